"""The interface between a task and the session that runs it.

A new task is a class that implements `Task`, in a file of its own, and a line in registry.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from csdctl.worker.compute.step import Step
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.orders import Orders
from csdctl.worker.tasks.progress import RunProgress
from csdctl.worker.tasks.reporter import Reporter


@dataclass(frozen=True)
class Group:
    """The ranks that work together until one of them is lost or joins."""

    generation: int
    ranks: tuple[int, ...]
    """The run's ranks, in order of MPI rank."""
    communicator: Communicator


@dataclass(frozen=True)
class TaskOutcome:
    """Why a task left its group."""

    is_finished: bool
    """False: it pauses, and continues in the next group."""
    reason: str = ""
    """Why a run ends before its last epoch, as in `Finished.reason`."""


PAUSED, FINISHED = TaskOutcome(is_finished=False), TaskOutcome(is_finished=True)


@dataclass(frozen=True)
class TaskContext:
    """What a task gets from its session."""

    spec: RunSpec
    me: RankSpec
    progress: RunProgress
    reporter: Reporter
    orders: Orders
    step: Step | None = None
    """The step of a probe session, when the rank is one: same model, recipe and noise."""

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self.me.rank == 0


class Task(Protocol):
    """What the ranks of a run do together."""

    def __init__(self, context: TaskContext) -> None: ...

    is_resumable: bool
    """Whether a new group takes over the state of rank 0 and continues from there."""

    @property
    def num_elements(self) -> int:
        """Elements of the vector that the ranks sum; known after `load`."""

    @property
    def variables(self) -> Sequence[Any]:
        """The variables that a rank takes over from rank 0, in addition to the progress, when they differ."""

    def load(self) -> None:
        """Load what the task needs and reach full speed; raises WorkerError."""

    def run(self, group: Group) -> TaskOutcome:
        """Work with `group` until the task is finished or pauses.

        Raises LinkLostError when the group is lost, and WorkerError when the task fails.
        """

    def finish(self, reason: str) -> None:
        """Report the completion record, after the group has ended."""
