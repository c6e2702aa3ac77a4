"""The setup of a run: how to start ranks and links, and the time limits of supervision."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.launch.mpi_job import Deadlines, JobOutcome, MpiJob
from csdctl.supervision.rank_processes import StartRank

SLOWEST_FACTOR = 4
"""The last rank to answer a ping gets this many times the delay of the slowest other rank."""


@dataclass(frozen=True)
class Patience:
    """How long supervision waits, and how often it retries."""

    start_s: float = 300.0
    """Until all ranks are ready; also until rank 0 is ready again after a loss."""
    start_poll_s: float = 1.0
    """The start deadline is checked at this interval while no message arrives."""
    silence_s: float = 300.0
    """Without progress on any rank."""
    answer_s: float = 8.0
    """A live rank answers a ping within this time, however busy its machine is."""
    min_answer_s: float = 3.0
    """The last rank to answer gets at least this long, even when all others answered at once."""
    join_s: float = 60.0
    """For mpirun to connect the ranks of a group, plus `join_per_rank_s` for each rank."""
    join_per_rank_s: float = 0.5
    stall_s: float = 20.0
    """A rank that others wait for and that does not answer a ping for this long is lost."""
    ping_interval_s: float = 5.0
    """A rank that keeps finished or paused ranks waiting is pinged after this long without a message."""
    settle_s: float = 0.5
    """Losses and failures with the same cause are reported within this time."""
    poll_s: float = 0.2
    """mpirun and the limits are checked at this interval while no message arrives."""
    exit_s: float = 30.0
    """For all ranks to exit after the last completion record."""
    mpirun_exit_s: float = 15.0
    """For the ranks to report why mpirun exited, when it exited with 0."""
    restart_interval_s: float = 10.0
    """Between two attempts to restart a lost rank."""
    max_restarts: int = 3
    """Restarts of one rank without progress in between."""
    max_attempts: int = 3
    """Groups in a row that fail without progress before the run fails."""

    def join_limit_s(self, num_ranks: int) -> float:
        """Return how long a group of `num_ranks` may take to connect."""
        return self.join_s + self.join_per_rank_s * num_ranks

    def last_answer_limit_s(self, delays_s: Iterable[float]) -> float:
        """Return how long the only rank that has not answered may take, given the other ranks' delays."""
        slowest_s = max(delays_s, default=0.0)
        return min(self.answer_s, max(self.min_answer_s, SLOWEST_FACTOR * slowest_s))

    def stalled(self, pinged: Mapping[int, float], now: float) -> list[int]:
        """Return the ranks that were pinged too long ago; `pinged` holds unanswered pings only."""
        return [rank for rank, since in pinged.items() if now - since > self.stall_s]

    def is_ping_due(self, last_message: float, now: float) -> bool:
        """Return whether a rank that keeps others waiting must be pinged."""
        return last_message < now - self.ping_interval_s

    def is_silent(self, last_progress: float, now: float) -> bool:
        """Return whether the run has made no progress for too long."""
        return now - last_progress > self.silence_s


NO_DEADLINES = Deadlines(start_s=10**9, silence_s=10**9)
"""Links print no events: the ranks report over SSH."""


class Links:
    """One mpirun, from its start to its end."""

    def __init__(self, job: MpiJob) -> None:
        """Start `job`."""
        self._job = job
        self._outcome: JobOutcome | None = None
        self._exited: float | None = None
        self.started = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        self._outcome = self._job.run(lambda event: None, NO_DEADLINES)

    def has_failed(self, grace_s: float) -> bool:
        """Return whether mpirun has exited although the ranks still need it.

        mpirun exits with 0 when the ranks have finished, and also when a node is lost. The ranks report
        which of the two: for `grace_s` after an exit with 0, this returns False.
        """
        if self._thread.is_alive():
            return False
        self._exited = self._exited or time.monotonic()
        is_clean = self._outcome is not None and self._outcome.exit_code == 0
        return time.monotonic() - self._exited > (grace_s if is_clean else 0.0)

    def end(self) -> JobOutcome | None:
        """End mpirun if it still runs, and return how it ended."""
        self._job.end()
        self._thread.join(timeout=10)
        return self._outcome


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True)
class RunSetup:
    """How to start the ranks and their links; the first two callables may raise CsdctlError."""

    run_id: str
    nodes: Sequence[str]
    """The machine of every rank, in order; rank 0 is on the host."""
    start_rank: StartRank
    restart_rank: StartRank
    """Start a rank on a machine that was lost: over a new connection, after killing its old processes."""
    start_links: Callable[[Sequence[int], int], Links]
    """Start mpirun for these ranks and this generation."""
    log_directory: Path
    min_nodes: int
    is_resumable: bool
    """Whether the run keeps its state for `train --resume`."""
    patience: Patience = DEFAULT_PATIENCE
    collective: str = ""
    """One of `protocol.orders.COLLECTIVE_NAMES`; '' lets the ranks measure which is fastest."""
    absent: tuple[int, ...] = ()
    """Ranks that take no part from the beginning."""
    should_stop: Callable[[], bool] = lambda: False
    """Whether to end the run in order, as the first Ctrl-C does."""
