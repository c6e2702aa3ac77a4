"""One csdctl at a time on every machine of a fleet.

A small program on each machine holds a lock for as long as its session lives, so that the lock of a
csdctl that was killed is free by itself. Only where the host vanished without a word (power cut) does a
node keep it; the host's next csdctl sees that the holder is gone, and takes it over.
"""

import contextlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from csdctl.errors import CsdctlError, RemoteCommandError, RunError
from csdctl.transport.many import Outcome, run_on_all, values_or_raise
from csdctl.transport.session import Conversation, Session
from csdctl.transport.standalone import build_program_command

ANSWER_DEADLINE_S = 30.0
_STARTTIME = 19
"""Its place in /proc/PID/stat, counted from the state."""

Holder = Mapping[str, object]


class MachineLockedError(RunError):
    """Another csdctl has the machine."""

    def __init__(self, node: str, holder: Holder) -> None:
        super().__init__(
            f"another csdctl works here: {show_holder(holder)}",
            node=node,
            remedy="wait for it or end it; if it is gone: csdctl clean --force",
        )
        self.holder = holder


@contextlib.contextmanager
def lock_machines(
    sessions: Mapping[str, Session], pythons: Mapping[str, str], *, doing: str, directory: Path
) -> Iterator[None]:
    """Hold every machine of `sessions`; raises MachineHeldError at once where another csdctl does.

    `pythons` names each machine's Python, `doing` and `directory` tell others who holds it.
    """
    me = describe_holder(doing, directory)
    with contextlib.ExitStack() as stack:

        def hold(session: Session) -> None:
            stack.callback(_hold(session, pythons[session.name], me).close)

        outcomes = run_on_all(sessions, hold)
        raise_if_locked(outcomes.values())
        values_or_raise(outcomes, "locking")
        yield


@contextlib.contextmanager
def relock_machine(session: Session, python: str, *, doing: str, directory: Path) -> Iterator[None]:
    """Hold a machine that may have lost its holder since this csdctl began; raises MachineHeldError.

    Another csdctl may have taken it in between.
    """
    me = describe_holder(doing, directory)
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(_hold(session, python, me).close)
        except MachineLockedError as error:
            if any(error.holder.get(key) != me[key] for key in ("machine", "boot", "pid", "started")):
                raise
        yield


def raise_if_locked(outcomes: Iterable[Outcome[Any]]) -> None:
    """Raise one MachineHeldError for all machines of `outcomes` that another csdctl has."""
    errors = [outcome.error for outcome in outcomes]
    if held := [error for error in errors if isinstance(error, MachineLockedError)]:
        names = ", ".join(error.node for error in held)
        raise MachineLockedError(names, held[0].holder)


def describe_holder(doing: str, directory: Path) -> dict[str, object]:
    """Who this process is, for whoever finds a machine held."""
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
    """The holder in words."""
    return (
        f"`csdctl {holder.get('command', '?')}`, process {holder.get('pid', '?')} on "
        f"{holder.get('host', '?')} in {holder.get('directory', '?')}, since {holder.get('since', '?')}"
    )


def is_gone(holder: Holder) -> bool:
    """Whether `holder` certainly runs no more: it was on this machine, and its process is not there."""
    me = describe_holder("", Path())
    if holder.get("machine") != me["machine"]:
        return False
    if holder.get("boot") != me["boot"]:
        return True
    pid = holder.get("pid")
    return isinstance(pid, int) and _start_time(pid) != holder.get("started")


def _hold(session: Session, python: str, me: Holder) -> Conversation:
    try:
        return _ask(session, python, me)
    except MachineLockedError as error:
        if not is_gone(error.holder):
            raise
        session.run(["kill", "-KILL", str(error.holder["holding_pid"])], deadline_s=ANSWER_DEADLINE_S)
        return _ask(session, python, me)


def _ask(session: Session, python: str, me: Holder) -> Conversation:
    conversation = session.converse(build_program_command(python, "lock"))
    try:
        conversation.send_line(json.dumps(me))
        word, _, rest = conversation.read_line(deadline_s=ANSWER_DEADLINE_S).partition(" ")
        if word == "mine":
            return conversation
        raise MachineLockedError(session.name, _parse_holder(rest))
    except EOFError:
        conversation.wait(deadline_s=ANSWER_DEADLINE_S).check(session.name, doing="locking the machine")
        raise RemoteCommandError("locking the machine gave no answer", node=session.name) from None
    except CsdctlError:
        conversation.close()
        raise


def _parse_holder(text: str) -> Holder:
    """What the lock file says; {} while its owner is still writing it."""
    with contextlib.suppress(ValueError):
        holder = json.loads(text)
        if isinstance(holder, dict):
            return holder
    return {}


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    return ""


def _start_time(pid: int) -> str:
    """When the process began, in the kernel's ticks; '' when there is none. Tells apart reused ids."""
    fields = _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()
    return fields[_STARTTIME] if len(fields) > _STARTTIME else ""
