"""The start of most commands: fleet, facts, and an open session to every machine, and their end.

`.csdctl/failed.json` has the nodes that failed in a command on many. `--failed-from` reads it.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from csdctl import errors
from csdctl.documents import load_json, load_kept, save_json
from csdctl.errors import CsdctlError, InputError, PartialError, option
from csdctl.fleet.checks import FLEET_NAME, check_machines, is_ready
from csdctl.fleet.facts import Facts, facts_path, load_facts, save_facts
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import HOST_NAME, Fleet, keep_nodes, select_nodes
from csdctl.fleet.names import format_node_names
from csdctl.launch.leftovers import CleanupOptions, Leftovers, clean_machine, lock_machines, raise_if_locked
from csdctl.notify import Say, warn
from csdctl.reporting.numbers import format_count
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger
from csdctl.shipping.store import StoredFile
from csdctl.transport.many import open_sessions, run_on_all, values_or_raise
from csdctl.transport.session import Session
from csdctl.worker.protocol.disk_errors import describe_os_error
from csdctl.worker.protocol.limits import RAISE, judge_limits, own_limits


@dataclass(frozen=True)
class Workspace:
    """A fleet with its sessions open."""

    project: ProjectDirectory
    fleet: Fleet
    """The host and the nodes that can be reached."""
    facts: dict[str, Facts]
    sessions: dict[str, Session]
    ledger: Ledger
    """Records what the command sends besides its sessions; saved when the workspace closes."""
    opening_s: float = 0.0
    unreachable: dict[str, CsdctlError] = field(default_factory=dict)
    selected: Fleet | None = None
    """The fleet with those nodes; None: there are none."""
    after: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Its callbacks run when the machines are unlocked and the sessions closed."""

    @property
    def whole(self) -> Fleet:
        """The fleet with the nodes that cannot be reached."""
        return self.selected or self.fleet


def worker_on(space: Workspace, machine: str, worker: StoredFile) -> tuple[Session, str, str]:
    """Return the first arguments of `call_worker` on a machine: session, Python, path of the worker."""
    return space.sessions[machine], space.fleet.python_of(machine), worker.path


@contextlib.contextmanager
def open_workspace(
    directory: Path,
    fleet: Fleet,
    command: str,
    *,
    is_locking: bool = False,
    say: Say = lambda line: None,
    min_nodes: int | None = None,
) -> Iterator[Workspace]:
    """Connect to the host and all nodes of `fleet`. Raises CsdctlError or NoNodeReachableError.

    With `is_locking`, lock all machines for `command`, after ending what a killed csdctl has left. Raises
    MachineLockedError. Without `min_nodes`, all nodes must be reachable. With it, that many, at least one.
    """
    started = time.monotonic()
    limits, expected, is_too_low = judge_limits(own_limits(), len(os.sched_getaffinity(0)), len(fleet.nodes))
    if is_too_low:
        raise InputError(f"limits on this machine: {limits}, expected {expected}", remedy=RAISE)
    project = ProjectDirectory(directory)
    ledger = Ledger(project.ledger, command, say)
    selected = fleet
    with (
        contextlib.ExitStack() as after,
        open_sessions(fleet, directory=directory, on_traffic=ledger.save) as opened,
    ):
        if opened.failed:
            if min_nodes is None or len(fleet.nodes) - len(opened.failed) < max(1, min_nodes):
                raise unreachable_error(fleet, opened.failed)
            fleet = keep_nodes(fleet, opened.reachable)
        sessions = dict(opened.reachable)
        facts = _load_or_collect_facts(fleet, sessions, is_saving=is_locking)
        with contextlib.ExitStack() as stack:
            if is_locking:
                _end_leftovers(sessions, fleet, say)
                locks = lock_machines(sessions, fleet, doing=command, directory=directory)
                _note_shared_homes(fleet, facts, stack.enter_context(locks), say)
            opening_s = time.monotonic() - started
            yield Workspace(
                project,
                fleet,
                facts,
                sessions,
                ledger,
                opening_s=opening_s,
                unreachable=dict(opened.failed),
                selected=selected,
                after=after,
            )


def _end_leftovers(sessions: Mapping[str, Session], fleet: Fleet, say: Say) -> None:
    def clean(session: Session) -> Leftovers:
        return clean_machine(session, fleet.python_of(session.name), CleanupOptions())

    outcomes = run_on_all(sessions, clean)
    raise_if_locked(outcomes.values())
    for name, leftovers in values_or_raise(outcomes, "looking for leftovers").items():
        if leftovers.num_processes:
            ended = format_count(leftovers.num_processes, "process")
            runs = f" of run {', '.join(leftovers.runs)}" if leftovers.runs else ""
            say(f"{name}: ended {ended}{runs} left by an earlier csdctl")


def _load_or_collect_facts(
    fleet: Fleet, sessions: dict[str, Session], *, is_saving: bool
) -> dict[str, Facts]:
    """Return the facts that `discover` saved. Collect the facts of new and unready machines."""
    try:
        facts = load_facts(fleet) if facts_path(fleet).exists() else {}
    except InputError:
        facts, is_saving = {}, False
    missing = [name for name in sessions if name not in facts or not is_ready(facts[name])]
    if missing:
        from csdctl.workflows.discovery.discover import collect_all_facts

        facts |= collect_all_facts(fleet, {name: sessions[name] for name in missing})
        if is_saving:  # no dry run
            with contextlib.suppress(OSError, CsdctlError):  # a directory that cannot be written to
                save_facts(fleet, facts)
    check_machines(fleet, [facts[name] for name in sessions])
    return facts


def _note_shared_homes(
    fleet: Fleet, facts: dict[str, Facts], sharing: Mapping[str, tuple[str, ...]], say: Say
) -> None:
    """Say once which nodes share a home, and with whom: prepared private data lies there."""
    new = {
        name: sharers for name, sharers in sharing.items() if set(sharers) - {*facts[name].home_shared_with}
    }
    for name, sharers in new.items():
        listed = ", ".join(sharers)
        say(f"{name}: shares its home with {listed}, or had this name; each name has its own directory there")
        facts[name] = replace(facts[name], home_shared_with=sharers)
    if new:
        with contextlib.suppress(OSError, CsdctlError):
            save_facts(fleet, facts)


def unreachable_error(fleet: Fleet, failed: Mapping[str, CsdctlError]) -> CsdctlError:
    """Return the error of a command that needs nodes of `fleet` that cannot be reached."""
    listed = "\n".join(f"  {error}" for error in failed.values())
    names = ",".join(failed)
    if len(failed) == len(fleet.nodes):
        return errors.NoNodeReachableError(f"no node of {fleet.path} can be reached:\n{listed}")
    problem = f"{len(failed)} of {len(fleet.nodes)} nodes cannot be reached:\n{listed}"
    return errors.UnreachableError(
        problem, remedy=f"fix them, or continue without them: {option('exclude')} {names}"
    )


def choose_fleet(
    path: Path,
    limit: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    failed_from: Path | None = None,
    *,
    may_be_empty: bool = False,
    with_servers: bool = True,
) -> Fleet:
    """Return the selected nodes of file `path`, as `select_nodes` does. Raises InputError."""
    select = partial(select_nodes, with_servers=with_servers)
    fleet = load_fleet(path)
    if failed_from:
        names = load_failed(failed_from)
        if unknown := sorted({*names.split(",")} - {*fleet.machines}):
            problem = f"{failed_from} lists {', '.join(unknown)}, which {path} does not have"
            raise InputError(problem, remedy=f"leave out {option('failed_from')}")
        fleet = select(fleet, [names])
    return select(fleet, limit or (), exclude or (), may_be_empty=may_be_empty)


def load_failed(path: Path) -> str:
    """Return the nodes that a command failed on, joined by commas. Raises InputError when none is listed."""
    content = load_json(path) if path.exists() else {"failed": ()}
    try:
        names = [str(name) for name in content["failed"] if name not in (HOST_NAME, FLEET_NAME)]
    except (KeyError, TypeError):
        remedy = "pass .csdctl/failed.json, or the output of a command with --json"
        problem = f"{path} does not list the nodes that a command failed on"
        raise InputError(problem, remedy=remedy) from None
    if not names:
        raise InputError(
            f"no failed nodes are recorded in {path}", remedy=f"leave out {option('failed_from')}"
        )
    return ",".join(names)


def record_failed(
    project: ProjectDirectory, command: str, machines: Sequence[str], failed: Mapping[str, CsdctlError]
) -> None:
    """Save where a command on `machines` failed, or warn. Where it succeeded, change only its own list."""
    listed = {name: {"message": error.message, "remedy": error.remedy} for name, error in failed.items()}
    earlier = load_kept(project.failed, dict[str, Any]) or {}
    before = earlier.get("failed")
    if not failed and earlier.get("command") == command and isinstance(before, dict):
        listed = {name: error for name, error in before.items() if name not in machines}
    if failed or earlier.get("command") == command:
        content = {"schema": "csdctl.failed/1", "command": command, "failed": listed}
        try:
            save_json(project.failed, content)
        except OSError as error:  # it must not hide what the command has done
            problem = describe_os_error(error, project.failed)[0]
            warn(f"warning: where {command} failed is not recorded: {problem}")


def conclude(
    project: ProjectDirectory,
    command: str,
    machines: Sequence[str],
    failed: Mapping[str, CsdctlError],
    retry: str,
) -> None:
    """End a command that ran on `machines`: save the failed ones, and raise one error for them.

    Raises NoNodeReachableError, PartialError when some machines succeeded, DeadlineError or CsdctlError.
    `retry`: the command line that repeats it where it failed.
    """
    record_failed(project, command, machines, failed)
    if not failed:
        return
    nodes = [name for name in machines if name != HOST_NAME]
    problems = list(failed.values())
    remedy = f"fix them as shown above, then retry only them: {retry}"
    are_unreachable = (error.exit_code == errors.ExitCode.UNREACHABLE for error in problems)
    if set(nodes) <= set(failed) and all(are_unreachable):
        raise errors.NoNodeReachableError(f"could not reach {format_node_names(nodes)}", remedy=remedy)
    error_type: type[CsdctlError] = PartialError if len(failed) < len(machines) else CsdctlError
    if error_type is CsdctlError and all(isinstance(error, errors.DeadlineError) for error in problems):
        error_type = errors.DeadlineError
    names = format_node_names(failed)
    raise error_type(f"{command} failed on {len(failed)} of {len(machines)} machines: {names}", remedy=remedy)
