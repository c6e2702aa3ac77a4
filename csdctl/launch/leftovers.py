"""Processes and files that an earlier csdctl left on a machine: find, end and remove them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.launch.machine_lock import MachineLockedError, is_gone, read_holder
from csdctl.runs.ledger import record_traffic
from csdctl.transport.commands import build_program_command
from csdctl.transport.local import LocalSession
from csdctl.transport.many import Outcome, run_on_all, run_on_nodes
from csdctl.transport.program import call_program
from csdctl.transport.session import Session
from csdctl.worker.protocol.json_codec import Count, MaxLength, ShortText

CLEAN_DEADLINE_S = 120.0
END_DEADLINE_S = 30.0


@dataclass(frozen=True)
class CleanupOptions:
    """The treatment of leftovers: end processes, remove unfinished files, remove all that csdctl wrote."""

    is_ending: bool = True
    is_removing: bool = False
    is_removing_all: bool = False
    is_removing_computed: bool = False
    """Also features and predictions, which are computed again when they are needed."""
    is_pruning: bool = False
    """Also stored files that no deployed tree uses."""
    is_forced: bool = False
    """Clean also a machine that another csdctl has locked, and end that csdctl."""
    run_id: str = ""
    """Only the processes of this run, whether the machine is locked or not; '' for all leftovers."""
    node: str = ""
    """With `run_id`: only the ranks and links of this node."""


@dataclass(frozen=True)
class Leftovers:
    """Leftovers found on one machine; with `CleanupOptions.is_ending` and `is_removing`, what was removed."""

    num_processes: Count
    runs: tuple[ShortText, ...]
    """Ids of the runs that the processes belonged to."""
    paths: tuple[Annotated[str, MaxLength(4096)], ...]
    num_bytes: Count
    num_unused: Count = 0
    """Unused files that were removed from the store, if that was requested."""
    features_bytes: Count = 0
    """The size of the features that stay there."""
    predictions_bytes: Count = 0
    """The size of the predictions that stay there."""


@dataclass(frozen=True)
class _Found:
    """The answer of standalone/leftovers.py."""

    holder: dict[ShortText, Any] | None
    left: Leftovers


def clean_machine(
    session: Session, python: str, options: CleanupOptions, *, deadline_s: float = CLEAN_DEADLINE_S
) -> Leftovers:
    """Find the leftovers on the machine of `session`; end and remove them as `options` request.

    Raises MachineLockedError where another csdctl is running, RemoteCommandError when the program fails.
    """
    command = build_program_command(python, "leftovers")
    found = call_program(session, command, options, _Found, "looking for leftovers", deadline_s)
    if found.holder is not None and not options.is_forced:
        described = read_holder(found.holder)
        if not is_gone(described):
            raise MachineLockedError(session.name, described)
        return clean_machine(session, python, replace(options, is_forced=True), deadline_s=deadline_s)
    return found.left


def end_run(run_id: str, sessions: Mapping[str, Session], pythons: Mapping[str, str]) -> list[str]:
    """End all processes of the run on every machine; return the machines where that failed.

    The processes on a lost machine end through MPI's own keepalive.
    """
    options = CleanupOptions(run_id=run_id)

    def clean(session: Session) -> Leftovers:
        return clean_machine(session, pythons[session.name], options, deadline_s=END_DEADLINE_S)

    return [name for name, outcome in run_on_all(sessions, clean).items() if outcome.error]


def end_rank(run_id: str, session: Session, python: str) -> None:
    """End the processes of the run's rank on the node of `session`; raises CsdctlError."""
    options = CleanupOptions(run_id=run_id, node=session.name)
    clean_machine(session, python, options, deadline_s=END_DEADLINE_S)


def clean(
    fleet: Fleet,
    options: CleanupOptions,
    *,
    directory: Path,
    on_done: Callable[[Outcome[Leftovers]], None] = lambda outcome: None,
) -> dict[str, Outcome[Leftovers]]:
    """Clean the host and all nodes of `fleet`; failures are in the result, not raised.

    On the host only unfinished files are removed, and features and predictions on request: plans, runs and
    models stay, whatever the options.
    """
    on_host = replace(options, is_removing_all=False, is_pruning=False)

    def visit(session: Session) -> Leftovers:
        wanted = on_host if session.name == HOST_NAME else options
        return clean_machine(session, fleet.python_of(session.name), wanted)

    host, on_traffic = LocalSession(HOST_NAME, directory), record_traffic(directory, "clean")
    return run_on_nodes(fleet, visit, directory=directory, on_done=on_done, on_traffic=on_traffic, host=host)
