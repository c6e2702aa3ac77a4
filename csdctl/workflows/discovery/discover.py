"""`discover`: collect facts of all machines of a fleet and save them beside fleet.yaml, with problems.

`trust`: the user accepts host keys, for many nodes at once, jump hosts first. A changed key is never replaced
here: the user must first remove it, by name.
"""

import base64
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

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
from csdctl.worker.protocol.durable_files import save_text

COPIED_KEY = "one machine listed twice, or a copied disk image"
"""Why several nodes have one host key."""


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
    """Return the key that each of `machines` presents. A changed key is a HostKeyError."""
    from csdctl.transport.ssh import JumpHosts, fetch_host_key  # paramiko takes 0.1 s to load

    known_hosts = KnownHosts.load(fleet_known_hosts_paths(fleet, directory))

    def fetch(node: Node) -> ShownKey:
        key_type, blob = fetch_host_key(node, jumps, connect_deadline_s=10.0)
        keys = known_hosts.lookup(node.key_address, node.port)
        is_new = all(key.is_revoked and key.blob != blob for key in keys)
        if not is_new:
            known_hosts.check(node.name, node.key_address, node.port, key_type, blob)
        return ShownKey(node, key_type, blob, "new" if is_new else "known")

    with contextlib.closing(JumpHosts(known_hosts)) as jumps:
        try:
            return run_on_all(machines, fetch)
        finally:
            record_traffic(directory, "trust")(add_up(jumps.opened))


def accept_keys(keys: Iterable[ShownKey], project: ProjectDirectory) -> None:
    """Add `keys` to csdctl's own known_hosts."""
    lines = _load_accepted(project)
    for key in keys:
        name = build_host_name(key.node.key_address, key.node.port)
        lines.append(f"{name} {key.type} {base64.b64encode(key.blob).decode()}")
    save_text(project.known_hosts, "".join(f"{line}\n" for line in lines))


def keep_named(fleet: Fleet, limit: Sequence[str]) -> Fleet:
    """Return the fleet with the jump hosts that `limit` names as its nodes, or unchanged without any."""
    jumps = {jump for node in fleet.nodes for jump in node.jumps if jump.name in limit}
    return replace(fleet, nodes=tuple(jumps)) if jumps else fleet


def forget_keys(
    machines: Iterable[Node], project: ProjectDirectory, *, is_dry_run: bool = False
) -> dict[str, int]:
    """Remove the keys of `machines` from csdctl's own known_hosts. Return the number of keys by name."""
    names = {build_host_name(node.key_address, node.port): node.name for node in machines}
    lines = [(line, names.get(line.split(" ", 1)[0])) for line in _load_accepted(project)]
    removed = Counter(name for _, name in lines if name)
    if removed and not is_dry_run:
        save_text(project.known_hosts, "".join(f"{line}\n" for line, name in lines if not name))
    return {name: removed[name] for name in names.values()}


def check_forgotten(fleet: Fleet, directory: Path) -> None:
    """Raise HostKeyError for a node with a key in a file that csdctl does not write."""
    known_hosts = KnownHosts.load(fleet_known_hosts_paths(fleet, directory))
    for node in fleet.nodes:
        for key in known_hosts.lookup(node.key_address, node.port):
            raise HostKeyError(
                f"its key remains in {key.path}:{key.line}",
                node=node.name,
                remedy=f"ssh-keygen -f '{key.path}' -R '{build_host_name(node.key_address, node.port)}'",
            )


def _load_accepted(project: ProjectDirectory) -> list[str]:
    return [*load_lines(project.known_hosts)] if project.known_hosts.exists() else []


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
    """Collect facts of host and nodes, and save them beside earlier facts. Errors are in the result."""
    host_keys: dict[str, str] = {}

    def visit(session: Session) -> Facts:
        if session.host_key_fingerprint:
            host_keys[session.name] = session.host_key_fingerprint
        return collect_facts(session, fleet.python_of(session.name))

    facts, warnings = _load_earlier(fleet)
    outcomes = run_on_nodes(
        fleet,
        visit,
        directory=directory,
        on_done=lambda outcome: on_done(_facts_or_problem(outcome)),
        on_traffic=record_traffic(directory, "discover"),
        has_host=True,
    )
    endpoints = ((node.name, node.endpoint) for node in fleet.nodes)
    warnings += find_shared("address", endpoints, "one machine listed twice")
    warnings += find_shared("host key", host_keys.items(), COPIED_KEY)
    new_facts = {name: _facts_or_problem(outcome) for name, outcome in outcomes.items()}
    path = save_facts(fleet, {**facts, **new_facts})
    return DiscoverResult(fleet, new_facts, errors_of(outcomes), tuple(warnings), path)


def collect_all_facts(fleet: Fleet, sessions: Mapping[str, Session]) -> dict[str, Facts]:
    """Return facts by machine, with the `problem` of a failed one. Raises UnreachableError for a lost one."""
    outcomes = run_on_all(sessions, lambda session: collect_facts(session, fleet.python_of(session.name)))
    for error in errors_of(outcomes).values():
        if isinstance(error, UnreachableError):
            raise error
    return {name: _facts_or_problem(outcome) for name, outcome in outcomes.items()}


def find_shared(what: str, values: Iterable[tuple[str, str]], cause: str) -> list[str]:
    """Return a warning for each of `values` that several nodes have, with their names."""
    return [
        f"{format_node_names(names)} have the same {what} {value}: {cause}"
        for value, names in names_by_value(values).items()
        if len(names) > 1
    ]


def _facts_or_problem(outcome: Outcome[Facts]) -> Facts:
    return Facts(outcome.name, problem=outcome.error.message) if outcome.error else outcome.get()


def _load_earlier(fleet: Fleet) -> tuple[dict[str, Facts], list[str]]:
    path = facts_path(fleet)
    if not path.exists():
        return {}, []
    try:
        return load_facts(fleet), []
    except InputError as error:
        aside = path.replace(path.with_name(path.name + ".bak"))
        return {}, [f"{error.message}: it is kept as {aside}, and all facts are collected again"]
