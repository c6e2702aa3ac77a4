"""`discover`: collect facts of all machines of a fleet and save them beside fleet.yaml, with problems."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import CsdctlError, InputError
from csdctl.facts.machine import collect_facts
from csdctl.fleet.facts import Drive, Facts, facts_path, load_facts, save_facts
from csdctl.fleet.hardware import match_drives
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import format_node_names, names_by_value
from csdctl.runs.ledger import record_traffic
from csdctl.transport.local import LocalSession
from csdctl.transport.many import Outcome, errors_of, run_on_all, run_on_nodes
from csdctl.transport.session import Session

OnDone = Callable[[Facts], None]
"""Called with the facts of each machine as it finishes; `problem` is set if it failed."""


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
    fleet: Fleet,
    *,
    directory: Path,
    on_done: OnDone = lambda facts: None,
) -> DiscoverResult:
    """Collect facts of the host and all nodes of `fleet`, and save them beside the fleet file.

    `fleet` may hold a subset of the file's nodes; facts of the other nodes are kept. Errors of nodes are in
    the result, not raised.
    """
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
        host=LocalSession(HOST_NAME, directory),
    )
    warnings = (*earlier_warnings, *find_shared_addresses(fleet), *find_shared_host_keys(host_keys))
    facts = {name: _facts_or_problem(outcome) for name, outcome in outcomes.items()}
    path = save_facts(fleet, {**earlier, **facts})
    return DiscoverResult(fleet, facts, errors_of(outcomes), warnings, path)


def collect_all_facts(fleet: Fleet, sessions: Mapping[str, Session]) -> dict[str, Facts]:
    """Return the facts of the machines of `sessions`; `problem` is set for machines that failed."""
    outcomes = run_on_all(sessions, lambda session: collect_facts(session, fleet.python_of(session.name)))
    return {name: _facts_or_problem(outcome) for name, outcome in outcomes.items()}


def find_shared_addresses(fleet: Fleet) -> tuple[str, ...]:
    """Return a warning for each address and port of several nodes: one machine, listed twice."""
    shared = {node.name: (node.address.lower(), node.port, node.jump) for node in fleet.nodes}
    return tuple(
        f"{format_node_names(names)} have the same address {address} port {port}: one machine listed twice"
        for (address, port, _), names in names_by_value(shared.items()).items()
        if len(names) > 1
    )


def find_shared_host_keys(fingerprints: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each host key of several nodes: one machine listed twice, or a copied disk image.

    `fingerprints` are by node.
    """
    return tuple(
        f"{format_node_names(names)} have the same host key {key}: "
        "one machine listed twice, or a copied disk image"
        for key, names in names_by_value(fingerprints.items()).items()
        if len(names) > 1
    )


def _facts_or_problem(outcome: Outcome[Facts]) -> Facts:
    return Facts(outcome.name, problem=outcome.error.message) if outcome.error else outcome.get()


def _earlier_facts(fleet: Fleet) -> tuple[dict[str, Facts], tuple[str, ...]]:
    """Return the saved facts; an unreadable file is set aside, with a warning."""
    if not facts_path(fleet).exists():
        return {}, ()
    try:
        return load_facts(fleet), ()
    except InputError as error:
        path = facts_path(fleet)
        aside = path.replace(path.with_name(path.name + ".bak"))
        return {}, (f"{error.message}: it is kept as {aside}, and all facts are collected again",)
