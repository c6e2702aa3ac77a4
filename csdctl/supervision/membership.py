"""The state of every rank of a run and of the group that trains."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from csdctl.errors import CsdctlError, InputError, NodeError, RunError
from csdctl.launch.mpi_job import CHECK_WORKER
from csdctl.supervision.rank_processes import ProcessEnded, RankProcesses
from csdctl.worker.protocol.events import (
    EpochEnd,
    Evaluating,
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    Misbehaved,
    NodeBack,
    NodeLost,
    Paused,
    Pong,
    Progress,
    Ready,
)


def as_loss(failed: Failed) -> CsdctlError:
    """Return why a rank that failed on its own is lost."""
    return NodeError(failed.message, node=failed.node, remedy=failed.remedy)


def as_run_failure(failed: Failed) -> CsdctlError:
    """Return the error of a run that ends because a rank failed: an InputError stays one."""
    error = InputError if failed.exit_code == InputError.exit_code else RunError
    return error(failed.message, node=failed.node, remedy=failed.remedy)


def as_run_error(error: CsdctlError) -> CsdctlError:
    """Return the error of a run that ends because of `error`."""
    if isinstance(error, RunError):
        return error
    return RunError(error.message, node=error.node, remedy=error.remedy)


PROGRESS = (Ready, Joined, Progress, Evaluating, EpochEnd, Finished, Paused)
"""Events of rank 0 that show that the run does not hang."""


@dataclass
class GroupState:
    """The ranks that train together; every loss, and every return of a rank, leads to a new group."""

    generation: int
    ranks: tuple[int, ...]
    last_progress: float
    """When rank 0 last reported progress, at first when the group was formed; times are monotonic seconds.

    No step ends without rank 0. What other ranks report does not count: a node could report for ever.
    """
    joined: set[int] = field(default_factory=set)
    paused: set[int] = field(default_factory=set)
    unlinked: set[int] = field(default_factory=set)
    """Members that lost the connection to the others."""
    first_unlinked: int | None = None
    """The one that said so first."""
    is_pausing: bool = False
    """Whether the group was ordered to end with the epoch."""
    pinged: dict[int, float] = field(default_factory=dict)
    """When each rank with an unanswered ping was pinged because others wait for it."""
    awaited: set[int] = field(default_factory=set)
    """The ranks for which rank 0 said that it waits, since its last progress."""
    awaited_by_server: dict[int, set[int]] = field(default_factory=dict)
    """The nodes for which each server said that it waits, since then."""
    answered: dict[int, float] = field(default_factory=dict)
    """When each rank last answered a ping or became ready, members or not."""
    last_joined: float = 0.0
    """When a member last reported that it has joined: rank 0 sends them its state one by one."""

    def record_arrival(self, event: Event, now: float) -> None:
        """Update the state that depends only on the arrival of `event`, before it is handled."""
        if isinstance(event, PROGRESS) and event.rank == 0:
            self.last_progress, self.awaited, self.awaited_by_server = now, set(), {}
        if isinstance(event, Ready | Pong):
            self.answered[event.rank] = now
        elif isinstance(event, Joined) and event.generation == self.generation:
            self.last_joined = now
        elif isinstance(event, LinkLost) and event.generation == self.generation:
            self.unlinked.add(event.rank)
            self.first_unlinked = event.rank if self.first_unlinked is None else self.first_unlinked

    def find_awaited(self) -> set[int]:
        """Return the ranks for which rank 0 waits, or in place of a server the nodes that it waits for."""
        return set().union(*(self.awaited_by_server.get(rank) or {rank} for rank in self.awaited))

    @property
    def have_all_joined(self) -> bool:
        """Whether every member has reported that it is connected to the others."""
        return self.joined == set(self.ranks)

    def has_answered_since(self, rank: int, time: float) -> bool:
        """Return whether `rank` has answered at `time` or later."""
        return self.answered.get(rank, 0.0) >= time


class Membership:
    """The ranks of a run; drops the processes of lost ranks and restarts them."""

    def __init__(
        self,
        nodes: Sequence[str],
        processes: RankProcesses,
        record: Callable[[Event], None],
        max_restarts: int,
        servers: Sequence[int] = (),
    ) -> None:
        """`nodes` and `servers` hold the machine of every rank and the rank of its server.

        `record` is called with every NodeLost and NodeBack.
        """
        self.nodes = nodes
        self.servers = servers or [0] * len(nodes)
        self.ready: set[int] = set()
        self.restarting: set[int] = set()
        """Ranks with a new process that is not ready yet."""
        self.finished: set[int] = set()
        self.has_trained = False
        """Whether all ranks of a group have joined it once; until then every loss ends the run."""
        self._processes = processes
        self._record = record
        self._max_restarts = max_restarts
        self._losses: dict[int, CsdctlError] = {}
        """Why each rank is lost, the latest loss last."""
        self._num_losses: dict[int, int] = {}
        """Losses of each rank since the run last made progress with it."""
        self._position = self._position_at_loss = (0, 0)
        """Epoch and step that rank 0 reported last, and had reported when it was lost last."""
        self._late_failures: dict[int, CsdctlError] = {}
        """Errors of ranks after they had reported completion."""

    @property
    def losses(self) -> list[CsdctlError]:
        """Why each currently lost rank was lost, the latest loss last."""
        return list(self._losses.values())

    def present(self, ranks: Iterable[int] | None = None) -> set[int]:
        """Return those of `ranks` (default: all) that can train now.

        A restarting rank cannot, nor one without the rank of its server, unless that is rank 0.
        """
        ready = self._processes.ranks & self.ready
        present = {rank for rank in ready if self.servers[rank] in ready | {0}}
        return present if ranks is None else present & set(ranks)

    def latest_loss(self, ranks: Iterable[int]) -> CsdctlError | None:
        """Return why a rank of `ranks` was lost last."""
        members = set(ranks)
        return next((error for rank, error in reversed(self._losses.items()) if rank in members), None)

    def is_exhausted(self, rank: int) -> bool:
        """Return whether `rank` was lost too often, without progress in between, to be restarted again."""
        return self._num_losses.get(rank, 0) > self._max_restarts

    def record_progress(self, report: Progress | EpochEnd, ranks: Iterable[int]) -> None:
        """Renew the restarts of ranks that make progress; `report` is of rank 0, in a group of `ranks`.

        Rank 0 makes progress when it completes a step after the one at which it was lost: no other rank can
        train without it. A node makes progress when it takes part in the end of an epoch: a node that is lost
        in each epoch only delays the others.
        """
        if isinstance(report, EpochEnd):
            self._position, renewed = (report.epoch + 1, 0), set(ranks)
        else:
            self._position = report.epoch, report.step
            renewed = {0} if self._position > self._position_at_loss else set()
        for rank in renewed:
            self._num_losses.pop(rank, None)

    def mark_lost(self, rank: int, error: CsdctlError) -> None:
        """Drop `rank` and restart it when its machine answers; raise RunError before any training."""
        if rank in self._processes.ranks and rank not in self.finished:
            self._lose(rank, error)

    def lose(self, rank: int, message: str, remedy: str = "") -> None:
        """Mark `rank` as lost, with the reason as text."""
        self.mark_lost(rank, NodeError(message, node=self.nodes[rank], remedy=remedy))

    def mark_finished(self, rank: int) -> None:
        """Record that a rank has reported completion; raise RunError if one crashed afterwards.

        Only when rank 0 has finished too is it certain that they had nothing left to do.
        """
        self.finished.add(rank)
        if 0 in self.finished:
            for error in self._late_failures.values():
                raise as_run_error(error)

    def note_late_failure(self, rank: int, error: CsdctlError) -> None:
        """Record what went wrong in a rank after it had reported completion."""
        self._late_failures.setdefault(rank, error)
        self.mark_finished(rank)

    def withdraw(self, rank: int) -> None:
        """Mark a rank as lost whose completion record is not true, whether it still runs or not."""
        self.finished.discard(rank)
        early = f"rank {rank} reported its completion before the run was complete"
        error = NodeError(early, node=self.nodes[rank], remedy=CHECK_WORKER)
        self._lose(rank, self._late_failures.pop(rank, error))

    def _lose(self, rank: int, error: CsdctlError) -> None:
        self._processes.drop(rank)
        self.ready.discard(rank)
        self.restarting.discard(rank)
        self._losses.pop(rank, None)  # keep the latest loss last
        self._losses[rank] = error
        self._record(NodeLost(rank, self.nodes[rank], str(error)))
        if not self.has_trained:
            raise as_run_error(error)
        self._num_losses[rank] = self._num_losses.get(rank, 0) + 1
        if rank == 0:
            self._position_at_loss = self._position
        if not self.is_exhausted(rank):
            self._processes.restart(rank)

    def handle_misbehaved(self, report: Misbehaved) -> str:
        """Mark the rank that rank 0 or its server reports as lost; return its node, '' for any other report.

        Rank 0 is on the host, and believed. A server could name only the nodes behind it: any other rank
        could name whomever it likes.
        """
        if not 0 < report.culprit < len(self.nodes):
            return ""
        if report.rank not in (0, self.servers[report.culprit]) or report.rank == report.culprit:
            return ""
        node = self.nodes[report.culprit]
        self.lose(
            report.culprit,
            report.message,
            "check that machine for failing memory, another version of csdctl or TensorFlow, or an intruder",
        )
        return node

    def readmit(self, ready: Ready) -> None:
        """Record that a lost rank is ready again and can join the next group."""
        self.restarting.discard(ready.rank)
        self._losses.pop(ready.rank, None)
        self._record(NodeBack(ready.rank, ready.node))

    def handle_exit(self, ended: ProcessEnded) -> None:
        """Drop a rank that finished, or mark it as lost; raise RunError if it crashed after it finished."""
        if ended.rank not in self.finished:
            self.mark_lost(ended.rank, ended.error)
            return
        self._processes.drop(ended.rank)
        if not ended.is_clean:
            self.note_late_failure(ended.rank, ended.error)
