"""What an earlier csdctl left on a machine: asked of it, ended and removed there."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from csdctl.errors import RemoteCommandError
from csdctl.launch.machine_lock import MachineHeldError, is_gone
from csdctl.transport.programs import build_program_command
from csdctl.transport.session import Session

LOOK_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Sweeping:
    """What to do with leftovers: end processes, remove unfinished files, remove all that csdctl wrote."""

    is_ending: bool = True
    is_removing: bool = False
    is_removing_all: bool = False
    is_forced: bool = False
    """Also where another csdctl works: that one is ended too."""


@dataclass(frozen=True)
class Leftovers:
    """What was found on one machine; with `Sweeping.is_ending` and `is_removing`, what is gone now."""

    num_processes: int
    runs: tuple[str, ...]
    """Ids of the runs that the processes belonged to."""
    paths: tuple[str, ...]
    num_bytes: int


def sweep_machine(session: Session, python: str, sweeping: Sweeping) -> Leftovers:
    """Find what is left on the machine of `session`, and do with it as `sweeping` says.

    Raises MachineHeldError where another csdctl works, RemoteCommandError when the machine cannot tell.
    """
    answer = _ask(session, python, sweeping)
    holder = answer["holder"]
    if holder is not None and not sweeping.is_forced:
        if not is_gone(holder):
            raise MachineHeldError(session.name, holder)
        answer = _ask(session, python, Sweeping(**{**asdict(sweeping), "is_forced": True}))
    runs = dict.fromkeys(process["run"] for process in answer["processes"] if process["run"])
    return Leftovers(len(answer["processes"]), tuple(runs), tuple(answer["paths"]), answer["num_bytes"])


def _ask(session: Session, python: str, sweeping: Sweeping) -> dict[str, Any]:
    request = json.dumps(asdict(sweeping)).encode() + b"\n"
    done = session.run(build_program_command(python, "leftovers"), stdin=request, deadline_s=LOOK_DEADLINE_S)
    done.check(session.name, doing="looking for what is left")
    try:
        return dict(json.loads(done.output))
    except ValueError:
        raise RemoteCommandError(
            f"looking for what is left gave no answer: {done.output[:80]!r}", node=session.name
        ) from None
