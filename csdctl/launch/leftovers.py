"""One csdctl at a time on every machine of a fleet. Find, end and remove what an earlier csdctl left there.

On each machine, a program holds a lock while its session lasts. It outlives the session only if the host
disappears without closing connections, as in a power cut. The next csdctl there detects that and ends it.
"""

import contextlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from csdctl.errors import CsdctlError, ExitCode, InputError, RunError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import format_node_names
from csdctl.runs.ledger import record_traffic
from csdctl.transport.commands import build_program_command
from csdctl.transport.many import Outcome, run_on_all, run_on_nodes, values_or_raise
from csdctl.transport.program import Program, within
from csdctl.transport.session import Session
from csdctl.worker.protocol.json_codec import RESULT, Count, MaxLength, ShortText
from csdctl.worker.protocol.processes import load_stat

Holder = Mapping[str, object]
"""The description of a csdctl that holds a lock, as `describe_holder` returns it."""
HOLDER_TEXTS = ("node", "command", "host", "machine", "boot", "started", "directory", "since", "ended")
HOLDER_PIDS = ("pid", "holding_pid")
PID_RANGE = range(2, 1 << 22)
UNLOCK_S = 3.0
"""The time for a lock's program to end in order. Then it is killed."""
END_DEADLINE_S = 30.0
"""The time to end the processes of a run on a machine."""


class MachineLockedError(RunError):
    """Another csdctl has locked the machine."""

    exit_code = ExitCode.LOCKED

    def __init__(self, node: str, holder: Holder) -> None:
        super().__init__(
            f"another csdctl is running here: {show_holder(holder)}",
            node=node,
            remedy="wait, or end it (csdctl runs stop); if it no longer exists: csdctl clean --kill",
        )
        self.holder = holder


@contextlib.contextmanager
def lock_machines(
    sessions: Mapping[str, Session], fleet: Fleet, *, doing: str, directory: Path
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Lock every machine of `sessions`. Yield by machine the names of those that share its home.

    Raises MachineLockedError at once where another csdctl is running. `doing` and `directory` describe this
    process to other csdctl processes that find a machine locked.
    """
    this_process = describe_holder(doing, directory)
    programs: dict[str, Program] = {}

    def lock(session: Session) -> tuple[str, ...]:
        programs[session.name], siblings = _lock(session, fleet.python_of(session.name), this_process)
        return siblings

    try:
        outcomes = run_on_all(sessions, lock)
        raise_if_locked(outcomes.values())
        yield values_or_raise(outcomes, "locking")
    finally:
        run_on_all(programs, _unlock)


def _unlock(program: Program) -> None:
    with contextlib.closing(program), contextlib.suppress(CsdctlError):
        program.conversation.wait(deadline_s=UNLOCK_S)  # its input ends


@contextlib.contextmanager
def relock_machine(session: Session, python: str, *, doing: str, directory: Path) -> Iterator[None]:
    """Lock a machine whose lock may have been released. Raises MachineLockedError if another has it."""
    this_process = describe_holder(doing, directory)
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(_unlock, _lock(session, python, this_process)[0])
        except MachineLockedError as error:
            if not _is_of(error.holder, this_process):
                raise
        yield


def raise_if_locked(outcomes: Iterable[Outcome[Any]]) -> None:
    """Raise one MachineLockedError for all machines of `outcomes` where another csdctl is running."""
    errors = (outcome.error for outcome in outcomes)
    if locked := [error for error in errors if isinstance(error, MachineLockedError)]:
        raise MachineLockedError(format_node_names(error.node for error in locked), locked[0].holder)


def describe_holder(doing: str, directory: Path) -> dict[str, object]:
    """Return the description of this process for other csdctl processes that find a machine locked."""
    return {
        "command": doing,
        "host": platform.node(),
        "machine": _read("/etc/machine-id") or platform.node(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "directory": str(directory.absolute()),
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    }


def show_holder(holder: Holder) -> str:
    """Return the holder as one line of text."""
    return (
        f"`csdctl {holder.get('command', '?')}`, process {holder.get('pid', '?')} on "
        f"{holder.get('host', '?')} in {holder.get('directory', '?')}, since {holder.get('since', '?')}"
    )


def is_elsewhere(holder: Holder) -> bool:
    """Return whether `holder` is on another machine. Clones, and containers of one image, have one id."""
    this_process = describe_holder("", Path())
    return any(holder.get(key) != this_process[key] for key in ("machine", "host"))


def is_gone(holder: Holder) -> bool:
    """Return whether `holder` has certainly ended: it ran on this machine, and its process does not exist."""
    if is_elsewhere(holder):
        return False
    if holder.get("boot") != describe_holder("", Path())["boot"]:
        return True
    pid = holder.get("pid")
    return isinstance(pid, int) and _start_time(pid) != holder.get("started")


def is_same_file(path: Path, directory: Path) -> bool:
    """Return whether `path` is `directory`, under whatever name. Not if one of them is gone."""
    try:
        return os.path.samefile(path, directory)
    except FileNotFoundError:
        return False


def is_held(directory: Path, pid: int) -> bool:
    """Return whether process `pid` has `directory` open or in its command line. True if that is hidden."""
    path, process = str(directory.resolve()), Path(f"/proc/{pid}")
    try:
        opened = any(is_same_file(descriptor, directory) for descriptor in (process / "fd").iterdir())
        return opened or os.fsencode(path) in (process / "cmdline").read_bytes()
    except OSError as error:
        return isinstance(error, PermissionError)  # of another user


def read_holder(content: object) -> Holder:
    """Return the parts of a holder's description that are of their type and in range. {} without any."""
    if not isinstance(content, dict):
        return {}
    texts = {key: content[key][:200] for key in HOLDER_TEXTS if isinstance(content.get(key), str)}
    numbers = {key: content[key] for key in HOLDER_PIDS if type(content.get(key)) is int}
    return texts | {key: number for key, number in numbers.items() if number in PID_RANGE}


@dataclass(frozen=True)
class _Held:
    holder: dict[ShortText, Any]


@dataclass(frozen=True)
class _Locked:
    """The answer when the lock is taken, with the directories of other machines in the same home."""

    siblings: Annotated[tuple[ShortText, ...], MaxLength(100)]


def _lock(session: Session, python: str, this_process: Holder) -> tuple[Program, tuple[str, ...]]:
    command = build_program_command(python, "receive", ["lock"])
    program = Program(session, command, "locking the machine", within(30.0))
    try:
        program.send({**this_process, "node": session.name})
        kind, answer = program.read({"locked": _Locked, "held": _Held})
        if kind == "locked":
            return program, answer.siblings
        holder = read_holder(answer.holder)
        if _is_of(holder, this_process) and holder.get("node") != session.name:
            raise InputError(
                f"{holder.get('node', '?')} and {session.name} are one machine, with one user and home",
                remedy="list it once in fleet.yaml, or give each name a `state` directory of its own; two "
                "machines with one home need different host names",
            )
        raise MachineLockedError(session.name, holder)
    except BaseException:
        program.close()
        raise


def _is_of(holder: Holder, process: Holder) -> bool:
    return all(holder.get(key) == process[key] for key in ("machine", "boot", "pid", "started"))


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    return ""


def _start_time(pid: int) -> str:
    """Return when the process began, in clock ticks, or '' if it does not exist. Detects reused ids."""
    stat = load_stat(pid)
    return str(stat.start_time) if stat else ""


@dataclass(frozen=True)
class CleanupOptions:
    """Whether processes are ended, unfinished files removed, and all files removed that csdctl wrote."""

    is_ending: bool = True
    is_removing: bool = False
    is_removing_all: bool = False
    is_removing_computed: bool = False
    """Whether features and predictions are removed, which are computed again when they are needed."""
    is_pruning: bool = False
    """Whether stored files that no deployed tree uses are among the files to remove."""
    unused_s: float | None = None
    """After how many seconds without use what csdctl makes or sends again is among them, and logs are."""
    is_forced: bool = False
    """Whether a machine that another csdctl has locked is cleaned, too, and that csdctl ended."""
    run_id: str = ""
    """Only this run's processes, and its copy of another server's run. '' for all leftovers."""
    node: str = ""
    """With `run_id`: only the ranks and links of this node."""


@dataclass(frozen=True)
class Leftovers:
    """Leftovers on one machine. With `CleanupOptions.is_ending` and `is_removing`, what was removed."""

    num_processes: Count
    runs: tuple[ShortText, ...]
    paths: tuple[Annotated[str, MaxLength(4096)], ...]
    num_bytes: Count
    features_bytes: Count = 0
    predictions_bytes: Count = 0


def clean_machine(
    session: Session, python: str, options: CleanupOptions, deadline_s: float = 120.0
) -> Leftovers:
    """Find, end and remove leftovers as `options` request. Raises MachineLockedError, RemoteCommandError."""
    command = build_program_command(python, "leftovers")
    with contextlib.closing(
        Program(session, command, "looking for leftovers", within(deadline_s))
    ) as program:
        program.send(options)
        answers: dict[str, type] = (
            {RESULT: Leftovers} if options.is_forced else {"held": _Held, RESULT: Leftovers}
        )
        kind, answer = program.read(answers)
        program.finish()
    if kind == RESULT:
        return answer  # type: ignore[no-any-return]
    holder = read_holder(answer.holder)
    if not is_gone(holder):
        raise MachineLockedError(session.name, holder)
    return clean_machine(session, python, replace(options, is_forced=True), deadline_s=deadline_s)


def end_run(run_id: str, sessions: Mapping[str, Session], fleet: Fleet, *, is_removing: bool = False) -> None:
    """End the processes of the run on all machines. `is_removing`: also remove copies of its state."""
    options = CleanupOptions(run_id=run_id, is_removing=is_removing)

    def visit(session: Session) -> Leftovers:
        return clean_machine(session, fleet.python_of(session.name), options, END_DEADLINE_S)

    run_on_all(sessions, visit)


def clean(
    fleet: Fleet,
    options: CleanupOptions,
    *,
    directory: Path,
    on_done: Callable[[Outcome[Leftovers]], None] = lambda outcome: None,
) -> dict[str, Outcome[Leftovers]]:
    """Clean host and nodes. Failures are in the result. Plans, runs and models of the host stay."""
    on_host = replace(options, is_removing_all=False, is_pruning=False)

    def visit(session: Session) -> Leftovers:
        chosen = on_host if session.name == HOST_NAME else options
        return clean_machine(session, fleet.python_of(session.name), chosen)

    record = record_traffic(directory, "clean")
    return run_on_nodes(fleet, visit, directory=directory, on_done=on_done, on_traffic=record, has_host=True)
