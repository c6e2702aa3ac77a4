"""What an earlier csdctl left on a machine: asked of it, ended and removed there."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from csdctl.errors import RemoteCommandError
from csdctl.launch.machine_lock import MachineLockedError, is_gone
from csdctl.transport.many import run_on_all
from csdctl.transport.session import Session
from csdctl.transport.standalone import build_program_command

LOOK_DEADLINE_S = 120.0
END_DEADLINE_S = 30.0


@dataclass(frozen=True)
class CleanupOptions:
    """What to do with leftovers: end processes, remove unfinished files, remove all that csdctl wrote."""

    is_ending: bool = True
    is_removing: bool = False
    is_removing_all: bool = False
    is_forced: bool = False
    """Also where another csdctl works: that one is ended too."""
    run_id: str = ""
    """Only the processes of this run, whoever works there; '' for all that csdctl left."""
    node: str = ""
    """With `run_id`: only the ranks and links of this node."""


@dataclass(frozen=True)
class Leftovers:
    """What was found on one machine; with `CleanupOptions.is_ending` and `is_removing`, what is gone now."""

    num_processes: int
    runs: tuple[str, ...]
    """Ids of the runs that the processes belonged to."""
    paths: tuple[str, ...]
    num_bytes: int
    num_unused: int = 0
    """Stored files that nothing used, if they were to be removed."""


def clean_machine(
    session: Session, python: str, sweeping: CleanupOptions, *, deadline_s: float = LOOK_DEADLINE_S
) -> Leftovers:
    """Find what is left on the machine of `session`, and do with it as `sweeping` says.

    Raises MachineHeldError where another csdctl works, RemoteCommandError when the machine cannot tell.
    """
    answer = _ask(session, python, sweeping, deadline_s)
    holder = answer["holder"]
    if holder is not None and not sweeping.is_forced:
        if not is_gone(holder):
            raise MachineLockedError(session.name, holder)
        answer = _ask(session, python, replace(sweeping, is_forced=True), deadline_s)
    runs = dict.fromkeys(process["run"] for process in answer["processes"] if process["run"])
    return Leftovers(len(answer["processes"]), tuple(runs), tuple(answer["paths"]), answer["num_bytes"])


def end_run(run_id: str, sessions: Mapping[str, Session], pythons: Mapping[str, str]) -> list[str]:
    """End what still carries `run_id` on any machine; returns the machines that no longer answer.

    What runs on a machine that is lost ends by MPI's own keepalive.
    """
    sweeping = CleanupOptions(run_id=run_id)

    def visit(session: Session) -> Leftovers:
        return clean_machine(session, pythons[session.name], sweeping, deadline_s=END_DEADLINE_S)

    return [name for name, outcome in run_on_all(sessions, visit).items() if outcome.error]


def end_rank(run_id: str, session: Session, python: str) -> None:
    """End what is left of the run's rank on the node of `session`; raises CsdctlError."""
    sweeping = CleanupOptions(run_id=run_id, node=session.name)
    clean_machine(session, python, sweeping, deadline_s=END_DEADLINE_S)


def _ask(session: Session, python: str, sweeping: CleanupOptions, deadline_s: float) -> dict[str, Any]:
    request = json.dumps(asdict(sweeping)).encode() + b"\n"
    done = session.run(build_program_command(python, "leftovers"), stdin=request, deadline_s=deadline_s)
    done.check(session.name, doing="looking for what is left")
    try:
        return dict(json.loads(done.output))
    except ValueError:
        raise RemoteCommandError(
            f"looking for what is left gave no answer: {done.output[:80]!r}", node=session.name
        ) from None
