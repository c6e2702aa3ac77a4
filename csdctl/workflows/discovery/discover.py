"""`discover`: collect facts of all machines of a fleet and save them beside fleet.yaml, with problems.

`trust`: the user accepts host keys, for many nodes at once, jump hosts first. A changed key is never replaced
here: the user must first remove it, by name.
"""

import base64
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from csdctl.documents import save_text
from csdctl.errors import CsdctlError, HostKeyError, InputError, UnreachableError
from csdctl.facts.machine import collect_facts
from csdctl.fleet.facts import Drive, Facts, facts_path, load_facts, save_facts
from csdctl.fleet.hardware import match_drives
from csdctl.fleet.model import Fleet, Node
from csdctl.fleet.names import format_node_names, names_by_value
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import record_traffic
from csdctl.transport.known_hosts import KnownHosts, build_host_name, fingerprint, load_lines
from csdctl.transport.many import Outcome, errors_of, fleet_known_hosts_paths, run_on_all, run_on_nodes
from csdctl.transport.meter import add_up
from csdctl.transport.session import Session


@dataclass(frozen=True)
class ShownKey:
    """The key presented by a machine, and whether it was known before."""

    node: Node
    type: str
    blob: bytes
    state: Literal["known", "new"]

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the format of ssh."""
        return fingerprint(self.blob)


def list_layers(fleet: Fleet) -> list[dict[str, Node]]:
    """Return the nodes of `fleet` and their jump hosts by name, grouped by number of jumps, ascending."""
    layers: dict[int, dict[str, Node]] = {}
    for machine in (machine for node in fleet.nodes for machine in (node, *node.jumps)):
        layers.setdefault(len(machine.jumps), {})[machine.name] = machine
    return [layers[depth] for depth in sorted(layers)]


def fetch_keys(
    fleet: Fleet, machines: Mapping[str, Node], *, directory: Path
) -> dict[str, Outcome[ShownKey]]:
    """Return the key presented by each of `machines`. HostKeyError for a changed key."""
    from csdctl.transport.ssh import JumpHosts, fetch_host_key  # paramiko takes 0.1 s to load

    known = KnownHosts.load(fleet_known_hosts_paths(fleet, directory))

    def fetch(node: Node) -> ShownKey:
        key_type, blob = fetch_host_key(node, jumps, connect_deadline_s=10.0)
        is_new = all(key.is_revoked and key.blob != blob for key in known.lookup(node.key_address, node.port))
        if not is_new:
            known.check(node.name, node.key_address, node.port, key_type, blob)
        return ShownKey(node, key_type, blob, "new" if is_new else "known")

    with contextlib.closing(JumpHosts(known)) as jumps:
        try:
            return run_on_all(machines, fetch)
        finally:
            record_traffic(directory, "trust")(add_up(jumps.opened))


def accept_keys(keys: Iterable[ShownKey], project: ProjectDirectory) -> None:
    """Add `keys` to csdctl's own known_hosts."""
    lines = list(_own_lines(project))
    for key in keys:
        name = build_host_name(key.node.key_address, key.node.port)
        lines.append(f"{name} {key.type} {base64.b64encode(key.blob).decode()}")
    save_text(project.known_hosts, "".join(f"{line}\n" for line in lines))


def keep_named(fleet: Fleet, limit: Sequence[str]) -> Fleet:
    """Return the fleet with the jump hosts that `limit` names as its nodes, as it is if there are none."""
    jumps = {jump for node in fleet.nodes for jump in node.jumps if jump.name in limit}
    return replace(fleet, nodes=tuple(jumps)) if jumps else fleet


def forget_keys(
    machines: Iterable[Node], project: ProjectDirectory, *, is_dry_run: bool = False
) -> dict[str, int]:
    """Remove the keys of `machines` from csdctl's own known_hosts. Return the number of keys by name."""
    names = {build_host_name(node.key_address, node.port): node.name for node in machines}
    removed = dict.fromkeys(names.values(), 0)
    kept = []
    for line in _own_lines(project):
        node = names.get(line.split(" ", 1)[0])
        if node is None:
            kept.append(line)
        else:
            removed[node] += 1
    if any(removed.values()) and not is_dry_run:
        save_text(project.known_hosts, "".join(f"{line}\n" for line in kept))
    return removed


def check_forgotten(fleet: Fleet, directory: Path) -> None:
    """Raise HostKeyError for a node with a key in a file that csdctl does not write."""
    known = KnownHosts.load(fleet_known_hosts_paths(fleet, directory))
    for node in fleet.nodes:
        for key in known.lookup(node.key_address, node.port):
            raise HostKeyError(
                f"its key remains in {key.path}:{key.line}",
                node=node.name,
                remedy=f"ssh-keygen -f '{key.path}' -R '{build_host_name(node.key_address, node.port)}'",
            )


def _own_lines(project: ProjectDirectory) -> Sequence[str]:
    return load_lines(project.known_hosts) if project.known_hosts.exists() else ()


OnLayer = Callable[[Mapping[str, Outcome[ShownKey]], Sequence[ShownKey], Sequence[str]], None]
"""Called with the keys of one layer of machines, the new ones, and the machines that cannot be asked.

Raises InputError unless the new keys may be accepted.
"""


def review_keys(
    fleet: Fleet, project: ProjectDirectory, on_layer: OnLayer, *, is_dry_run: bool = False
) -> int:
    """Accept the new host keys of `fleet`, jump hosts first, a layer at a time. Return their number."""
    closed: set[str] = set()
    num_accepted = 0
    for layer in list_layers(fleet):
        closed |= {name for name, node in layer.items() if node.jump and node.jump.name in closed}
        machines = {name: node for name, node in layer.items() if name not in closed}
        outcomes = fetch_keys(fleet, machines, directory=project.root)
        new = [key for outcome in outcomes.values() if (key := outcome.value) and key.state == "new"]
        on_layer(outcomes, new, [name for name in layer if name in closed])
        if is_dry_run:
            closed |= {key.node.name for key in new}
        elif new:
            accept_keys(new, project)
            num_accepted += len(new)
    return num_accepted


@dataclass(frozen=True)
class DiscoverResult:
    """The result of `discover`: facts of every machine, errors of failed machines, and warnings."""

    fleet: Fleet
    facts: dict[str, Facts]
    failed: dict[str, CsdctlError]
    warnings: tuple[str, ...]
    path: Path

    @property
    def drives(self) -> dict[str, Drive]:
        """The host's drive of each node for which host and node report the same serial number."""
        return {} if self.fleet.emulated else match_drives(self.facts)


def discover(
    fleet: Fleet, *, directory: Path, on_done: Callable[[Facts], None] = lambda facts: None
) -> DiscoverResult:
    """Collect facts of host and nodes, save them with those of other nodes. Errors are in the result."""
    host_keys: dict[str, str] = {}

    def visit(session: Session) -> Facts:
        if session.host_key_fingerprint:
            host_keys[session.name] = session.host_key_fingerprint
        return collect_facts(session, fleet.python_of(session.name))

    earlier, earlier_warnings = _earlier_facts(fleet)
    outcomes = run_on_nodes(
        fleet,
        visit,
        directory=directory,
        on_done=lambda outcome: on_done(_facts_or_problem(outcome)),
        on_traffic=record_traffic(directory, "discover"),
        has_host=True,
    )
    warnings = (*earlier_warnings, *find_shared_addresses(fleet), *find_shared_host_keys(host_keys))
    facts = {name: _facts_or_problem(outcome) for name, outcome in outcomes.items()}
    path = save_facts(fleet, {**earlier, **facts})
    return DiscoverResult(fleet, facts, errors_of(outcomes), warnings, path)


def collect_all_facts(fleet: Fleet, sessions: Mapping[str, Session]) -> dict[str, Facts]:
    """Return facts by machine, with the `problem` of a failed one. Raises UnreachableError for a lost one."""
    outcomes = run_on_all(sessions, lambda session: collect_facts(session, fleet.python_of(session.name)))
    for error in errors_of(outcomes).values():
        if isinstance(error, UnreachableError):
            raise error
    return {name: _facts_or_problem(outcome) for name, outcome in outcomes.items()}


def find_shared_addresses(fleet: Fleet) -> tuple[str, ...]:
    """Return a warning for each address and port of several nodes: one machine, listed twice."""
    endpoints = ((node.name, node.endpoint) for node in fleet.nodes)
    return _find_shared("address", endpoints, "one machine listed twice")


def find_shared_host_keys(fingerprints: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each host key, by node in `fingerprints`, of several nodes."""
    return _find_shared("host key", fingerprints.items(), "one machine listed twice, or a copied disk image")


def _find_shared(what: str, values: Iterable[tuple[str, str]], why: str) -> tuple[str, ...]:
    return tuple(
        f"{format_node_names(names)} have the same {what} {value}: {why}"
        for value, names in names_by_value(values).items()
        if len(names) > 1
    )


def _facts_or_problem(outcome: Outcome[Facts]) -> Facts:
    return Facts(outcome.name, problem=outcome.error.message) if outcome.error else outcome.get()


def _earlier_facts(fleet: Fleet) -> tuple[dict[str, Facts], tuple[str, ...]]:
    if not facts_path(fleet).exists():
        return {}, ()
    try:
        return load_facts(fleet), ()
    except InputError as error:
        path = facts_path(fleet)
        aside = path.replace(path.with_name(path.name + ".bak"))
        return {}, (f"{error.message}: it is kept as {aside}, and all facts are collected again",)
