"""A run from its ranks' start to their end, whatever is lost on the way.

Ranks are started over SSH and stay; mpirun's links join those that are there into a group. When something is
lost, the group is over: who no longer answers is left out, and a new group goes on from the last completed
step. A node that comes back joins at the end of an epoch (docs/decisions/0012).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import CsdctlError, DeadlineError, InputError, NodeError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.launch.diagnosis import find_cause
from csdctl.launch.links import Links
from csdctl.launch.mpi_job import Deadlines, JobOutcome
from csdctl.launch.rank_process import ProcessEnded, RankMessage
from csdctl.launch.rank_processes import RankProcesses, Restarted, StartRank
from csdctl.worker.protocol.events import (
    EpochEnd,
    Evaluating,
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    NodeBack,
    NodeLost,
    Paused,
    Pong,
    Progress,
    Ready,
    WaitingFor,
)
from csdctl.worker.protocol.orders import FormGroup, PauseAtEpochEnd, Ping, Stop

ANSWER_S = 8.0
"""A rank that lives answers within this, however busy its machine is."""
LEAST_ANSWER_S = 3.0
"""And when all others have answered at once, it gets this long."""
JOIN_S, JOIN_EACH_S = 60.0, 0.5
"""How long mpirun may take to bring the ranks together: at all, and more for each of them."""
STALL_S = 20.0
"""A rank that others wait for and that does not answer for so long is lost."""
ASK_INTERVAL_S = 5.0
SETTLE_S = 0.5
LOOK_S = 0.2
"""mpirun, and all that has a deadline, is looked at this often when nobody says anything."""
END_S = 30.0
MAX_RETURNS = 3
"""How often a node may come back: one that is lost again and again only stops the others."""
MAX_ATTEMPTS = 3
"""Groups in a row that come to nothing before the run is given up."""
PROGRESSING = (Ready, Joined, Progress, Evaluating, EpochEnd, Finished, Paused)


@dataclass(frozen=True)
class SupervisedRun:
    """What supervision needs to start and join ranks; the first three callables may raise CsdctlError."""

    nodes: Sequence[str]
    """The machine of every rank, in order; rank 0 is on the host."""
    start_rank: StartRank
    restart_rank: StartRank
    """The same on a machine that was lost: over a new connection, after ending what is left there."""
    build_links: Callable[[Sequence[int], int], list[str]]
    """mpirun's command line for these ranks and generation."""
    log_path: Callable[[int | None], Path]
    directory: Path
    min_nodes: int
    is_resumable: bool
    """Whether what is done so far is kept, for `train --resume`."""
    deadlines: Deadlines
    collective: str = ""
    """'star' or 'allreduce'; '' measures which is faster."""
    absent: tuple[int, ...] = ()
    """Ranks that do not take part from the beginning."""


class Supervisor:
    """One run; call `run` once."""

    def __init__(self, supervised: SupervisedRun, record: Callable[[Event], None]) -> None:
        """`record` is called with every event, in order, by the thread that calls `run`."""
        self._run = supervised
        self._record = record
        self._processes = RankProcesses(supervised.start_rank, supervised.restart_rank)
        self._ready: set[int] = set()
        self._returning: set[int] = set()
        self._postponed: deque[RankMessage] = deque()
        self._in_hand: RankMessage | None = None
        self._num_losses: dict[int, int] = {}
        self._group: tuple[int, ...] = ()
        self._generation = 0
        self._collectives: dict[tuple[int, ...], str] = {}
        self._links: Links | None = None
        self._has_joined = False
        self._attempts = 0
        self._answered: dict[int, float] = {}
        self._asked: dict[int, float] = {}
        self._joined: set[int] = set()
        self._paused: set[int] = set()
        self._unlinked: set[int] = set()
        self._is_stopping = False
        self._is_regrouping = False
        self._heard = time.monotonic()
        self.outcomes: list[JobOutcome] = []
        """How each mpirun ended."""
        self._finished: dict[int, Finished] = {}
        self._lost: dict[int, CsdctlError] = {}

    def run(self) -> None:
        """Train to the end; raises RunError, DeadlineError, InputError; KeyboardInterrupt the second time."""
        try:
            self._start()
            self._form_group(sorted(self._processes.ranks))
            while set(self._finished) < set(self._group):
                self._interruptible(self._turn)
            self._await_ends()
        finally:
            self._processes.close()
            self._end_links()

    def _interruptible(self, do: Callable[[], None]) -> None:
        """The first Ctrl-C lets the ranks finish their step; the second one ends everything."""
        try:
            do()
        except KeyboardInterrupt:
            if self._is_stopping or not self._has_joined or self._is_regrouping:
                raise
            self._is_stopping = True
            if self._in_hand:  # an interrupt comes anywhere, also before anything was done about a notice
                self._postponed.appendleft(self._in_hand)
            self._processes.order(0, Stop())

    @property
    def is_stopping(self) -> bool:
        """Whether somebody asked the run to stop."""
        return self._is_stopping

    def _start(self) -> None:
        """Start all ranks and wait until they are ready; before the first step every failure is fatal."""
        for rank in range(len(self._run.nodes)):
            if rank not in self._run.absent:
                self._processes.start(rank)
        deadline = time.monotonic() + self._run.deadlines.start_s
        while self._ready < self._processes.ranks:
            notice = self._next(1.0)
            if isinstance(notice, ProcessEnded):
                raise _fatal(notice.error)
            if isinstance(notice, Failed):
                raise _failure(notice)
            if time.monotonic() > deadline:
                silent = ", ".join(
                    self._run.nodes[rank] for rank in sorted(self._processes.ranks - self._ready)
                )
                raise DeadlineError(
                    f"{silent} did not start in time", remedy="raise --start-deadline, or see its log"
                )

    def _next(self, timeout_s: float) -> RankMessage | None:
        """The next notice that nothing was done about, recorded."""
        if not self._postponed:
            return self._hear(timeout_s)
        self._in_hand = self._postponed.popleft()
        return self._in_hand

    def _hear(self, timeout_s: float) -> RankMessage | None:
        """The next notice that arrives, recorded."""
        notice = self._processes.next(timeout_s)
        if isinstance(notice, Restarted):
            self._returning.add(notice.rank)
            return None
        self._in_hand = notice
        if notice is None or isinstance(notice, ProcessEnded):
            return notice
        if isinstance(notice, PROGRESSING):
            self._heard = time.monotonic()
        if isinstance(notice, Ready):
            self._ready.add(notice.rank)
            self._answered[notice.rank] = time.monotonic()
        elif isinstance(notice, LinkLost) and notice.generation == self._generation:
            self._unlinked.add(notice.rank)
        elif isinstance(notice, Pong):
            self._answered[notice.rank] = time.monotonic()
            return notice  # nobody wants to read these
        self._record(notice)
        return notice

    def _form_group(self, ranks: Sequence[int]) -> None:
        self._generation += 1
        self._heard = time.monotonic()
        self._group = tuple(ranks)
        self._joined, self._paused, self._unlinked = set(), set(), set()
        self._asked, self._answered = {}, {}
        order = FormGroup(
            self._generation, self._group, self._collectives.get(self._group, self._run.collective)
        )
        if self._is_stopping:  # rank 0 may be a new process, which does not know
            self._processes.order(0, Stop())
        for rank in self._group:
            self._processes.order(rank, order)
        if len(self._group) > 1:
            self._links = Links(
                self._run.build_links(self._group, self._generation),
                len(self._group),
                self._run.log_path,
                self._run.directory,
            )
        self._is_regrouping = False

    def _turn(self) -> None:
        """Take one notice in, and look whether the group still lives."""
        self._take(self._next(LOOK_S))
        self._in_hand = None
        if self._links and not self._finished and not self._paused:
            self._look_at_links(self._links)
        self._ask_late()
        self._look_at_stalled()
        self._look_at_silence()

    def _take(self, notice: RankMessage | None) -> None:
        """Do what a notice asks for; twice does no harm."""
        if isinstance(notice, ProcessEnded):
            self._take_end(notice)
            if notice.rank in self._group and notice.rank not in self._finished:
                self._regroup(f"{notice.node} is lost")
        elif isinstance(notice, Failed):
            self._take_failure(notice)
        elif isinstance(notice, Joined) and notice.generation == self._generation:
            self._joined.add(notice.rank)
            self._collectives[self._group] = notice.collective
            if self._joined == set(self._group):
                self._has_joined = True
                self._ask_for_pause()
        elif isinstance(notice, Progress | EpochEnd):
            self._attempts = 0
        elif isinstance(notice, Finished):
            self._finished[notice.rank] = notice
        elif isinstance(notice, Paused) and notice.generation == self._generation:
            self._paused.add(notice.rank)
            if self._paused == set(self._group):
                self._end_links()
                self._form_group(sorted(self._present(self._processes.ranks)))
        elif isinstance(notice, LinkLost) and notice.rank in self._unlinked:
            self._regroup("the connection between the ranks broke")
        elif isinstance(notice, WaitingFor):
            self._ask(notice.nodes or [self._run.nodes[rank] for rank in self._group])
        elif isinstance(notice, Ready) and notice.rank in self._returning:
            self._welcome(notice)

    def _take_end(self, ended: ProcessEnded) -> None:
        """A rank's process is no more: it has finished, or is lost."""
        if ended.rank not in self._finished:
            self._lose(ended.rank, ended.error)
        elif ended.is_clean:
            self._processes.give_up(ended.rank)
        else:
            raise _fatal(ended.error)

    def _await_ends(self) -> None:
        """A run is done when every rank has left as it should."""
        deadline = time.monotonic() + END_S
        while left := sorted(set(self._group) & self._processes.ranks):
            notice = self._next(LOOK_S)
            if isinstance(notice, ProcessEnded):
                self._take_end(notice)
            if time.monotonic() > deadline:
                late = ", ".join(self._run.nodes[rank] for rank in left)
                raise RunError(f"{late} finished and did not end", remedy=self._logs())

    def _take_failure(self, failed: Failed) -> None:
        """A rank gave up by itself: on one node, the others go on; what would fail on all ends the run."""
        if failed.rank not in self._group:  # it only came back, and the others do well without it
            self._lose(failed.rank, _reason(failed))
            return
        if failed.rank == 0 or failed.exit_code == InputError.exit_code or not self._has_joined:
            raise _failure(failed)
        # All ranks see the same sums: what one finds wrong with them, rank 0 finds too.
        deadline = time.monotonic() + SETTLE_S
        while (left_s := deadline - time.monotonic()) > 0:
            notice = self._hear(left_s)
            if isinstance(notice, Failed) and notice.rank == 0:
                raise _failure(notice)
            if notice:
                self._postponed.append(notice)
        self._lose(failed.rank, _reason(failed))
        self._regroup(f"{failed.node} gave up")

    def _lose(self, rank: int, error: CsdctlError) -> None:
        """Leave `rank` out from now on, and let it come back when it can."""
        if rank not in self._processes.ranks or rank in self._finished:
            return
        self._processes.give_up(rank)
        self._postponed = deque(notice for notice in self._postponed if notice.rank != rank)
        self._ready.discard(rank)
        self._returning.discard(rank)
        self._lost.pop(rank, None)  # the latest loss stands last
        self._lost[rank] = error
        self._record(NodeLost(rank, self._run.nodes[rank], str(error)))
        if not self._has_joined:
            raise _fatal(error)
        self._num_losses[rank] = self._num_losses.get(rank, 0) + 1
        if self._num_losses[rank] <= MAX_RETURNS:
            self._processes.bring_back(rank)

    def _welcome(self, ready: Ready) -> None:
        """A rank that was lost is ready again: it joins when the epoch ends."""
        self._returning.discard(ready.rank)
        self._lost.pop(ready.rank, None)
        self._record(NodeBack(ready.rank, ready.node))
        if self._joined == set(self._group):
            self._ask_for_pause()

    def _ask_for_pause(self) -> None:
        """Have the group end with the epoch when somebody waits to join.

        Only once it has begun: a rank that takes a new group forgets what was asked of the one before.
        """
        if self._present(self._processes.ranks) - set(self._group):
            self._processes.order(0, PauseAtEpochEnd())

    def _regroup(self, why: str) -> None:
        """The group is over: find out who is left, and form a new one."""
        if self._finished:
            raise self._incomplete(why)
        outcome = self._end_links()
        self._attempts += 1
        self._joined = set()
        group = set(self._group)
        self._settle(group)
        if self._finished:
            if self._unlinked or not group <= self._present(group) | set(self._finished):
                raise self._incomplete(why)
            self._is_regrouping = False
            return  # they were about to finish, and no longer need each other
        cause = self._cause(outcome)
        if not self._has_joined or self._attempts > MAX_ATTEMPTS:
            raise cause or RunError(f"{why}, and no new group of ranks comes about", remedy=self._logs())
        if self._attempts == MAX_ATTEMPTS and cause:
            for rank in self._present(group):
                if self._run.nodes[rank] == cause.node:  # it answers, and still no group with it comes about
                    self._lose(rank, cause)
        if 0 not in self._present(group):
            self._await_host()
        left = sorted(self._present(group))
        self._check_num_nodes(left)
        self._form_group(left)

    def _incomplete(self, why: str) -> RunError:
        """Some have finished and left: the others cannot go on without them."""
        missing = [self._run.nodes[rank] for rank in self._group if rank not in self._finished]
        error = self._latest_loss()
        return RunError(
            f"{error.message if error else why}\nThe run has no completion record from {', '.join(missing)}",
            node=error.node if error else "",
            remedy=f"the model of the other ranks is in the run directory; {self._logs()}",
        )

    def _check_num_nodes(self, left: Sequence[int]) -> None:
        num_nodes = sum(self._run.nodes[rank] != HOST_NAME for rank in left)
        if num_nodes < self._run.min_nodes:
            lost = "\n".join(f"  {error}" for error in self._lost.values())
            if not self._run.is_resumable:
                raise RunError(
                    f"it takes all {len(self._run.nodes)} ranks; lost:\n{lost}",
                    remedy="mend them, then try again",
                )
            raise RunError(
                f"{num_nodes} nodes are left, and --min-nodes is {self._run.min_nodes}; lost:\n{lost}",
                remedy="mend them, then go on from the last completed step: csdctl train --resume "
                f"{self._run.log_path(0).parent.parent.name}",
            )

    def _present(self, ranks: Iterable[int]) -> set[int]:
        """Those of `ranks` that can train now: one that is being started again cannot."""
        return set(ranks) & self._processes.ranks & self._ready

    def _settle(self, group: set[int]) -> None:
        """Hear who ended, and ask the others whether they are there."""
        begun = time.monotonic()
        number = self._generation
        for rank in self._present(group):
            self._processes.order(rank, Ping(number))
        patience_s = ANSWER_S
        while time.monotonic() - begun < patience_s:
            waiting = {
                rank
                for rank in self._present(group - set(self._finished))
                if self._answered.get(rank, 0.0) < begun
            }
            if not waiting and time.monotonic() - begun > SETTLE_S:
                return
            if len(waiting) == 1 and len(group) > len(waiting):
                # What all others could do in this time, one that lives could do in four times of it.
                slowest_s = max([at - begun for at in self._answered.values() if at > begun], default=0.0)
                patience_s = min(ANSWER_S, max(LEAST_ANSWER_S, 4 * slowest_s))
            left_s = begun + (patience_s if waiting else SETTLE_S) - time.monotonic()
            self._take_between_groups(self._next(max(0.0, left_s)))
        for rank in waiting:
            node = self._run.nodes[rank]
            self._lose(
                rank,
                NodeError(
                    f"lost: rank {rank} no longer answers (node down, link cut, or process stopped)",
                    node=node,
                    remedy="look after the node",
                ),
            )

    def _take_between_groups(self, notice: RankMessage | None) -> None:
        """Take in what matters while there is no group."""
        if isinstance(notice, ProcessEnded):
            self._take_end(notice)
        elif isinstance(notice, Failed):
            if notice.rank == 0:
                raise _failure(notice)
            self._lose(notice.rank, _reason(notice))
        elif isinstance(notice, Finished):
            self._finished[notice.rank] = notice
        elif isinstance(notice, Ready) and notice.rank in self._returning:
            self._welcome(notice)

    def _await_host(self) -> None:
        """Rank 0 is being started again, on this machine: nobody can go on without it."""
        deadline = time.monotonic() + self._run.deadlines.start_s
        while 0 not in self._ready:
            notice = self._next(LOOK_S)
            self._take_between_groups(notice)
            if time.monotonic() > deadline or self._num_losses.get(0, 0) > MAX_RETURNS:
                raise _fatal(self._lost.get(0, RunError("rank 0 cannot be started again")))

    def _ask(self, nodes: Sequence[str]) -> None:
        """Ask the ranks that others wait for whether they are there."""
        now = time.monotonic()
        for rank in (self._run.nodes.index(node) for node in nodes):
            if rank in self._group and rank not in self._asked:
                self._asked[rank] = now
                self._processes.order(rank, Ping(self._generation))

    def _ask_late(self) -> None:
        """Who is behind others that have finished or paused, which wait for nobody, is asked now and then."""
        if not self._finished and not self._paused:
            return
        late = set(self._group) - set(self._finished) - self._paused
        silent_since = time.monotonic() - ASK_INTERVAL_S
        self._ask(
            [
                self._run.nodes[rank]
                for rank in late
                if max(self._heard, self._answered.get(rank, 0.0)) < silent_since
            ]
        )

    def _look_at_stalled(self) -> None:
        """Who was asked and has not answered for too long is lost."""
        now = time.monotonic()
        self._asked = {
            rank: asked for rank, asked in self._asked.items() if self._answered.get(rank, 0.0) < asked
        }
        stalled = [rank for rank, asked in self._asked.items() if now - asked > STALL_S]
        for rank in stalled:
            node = self._run.nodes[rank]
            self._lose(rank, NodeError(f"rank {rank} is stopped, or its machine hangs", node=node))
        if stalled:
            nodes = ", ".join(self._run.nodes[rank] for rank in stalled)
            self._regroup(f"{nodes} did not answer")

    def _look_at_links(self, links: Links) -> None:
        """Is mpirun there, and have the ranks found each other by now?"""
        if links.failed_for_s > 0:
            self._regroup("mpirun ended")
        elif len(self._joined) < len(self._group):
            limit_s = JOIN_S + JOIN_EACH_S * len(self._group)
            if time.monotonic() - links.started > limit_s:
                self._regroup(f"the ranks did not find each other within {limit_s:.0f} s")

    def _look_at_silence(self) -> None:
        if time.monotonic() - self._heard > self._run.deadlines.silence_s:
            raise DeadlineError(
                "no rank has done a step for too long: the run hangs", remedy=f"see {self._logs()}"
            )

    def _end_links(self) -> JobOutcome | None:
        self._is_regrouping = True  # until there is a group again: an interrupt until then ends the run
        outcome = self._links.end() if self._links else None
        self._links = None
        if outcome:
            self.outcomes.append(outcome)
        return outcome

    def _cause(self, outcome: JobOutcome | None) -> CsdctlError | None:
        """Who was lost, or what mpirun's last words tell."""
        if loss := self._latest_loss():
            return loss
        if outcome is None:
            return None
        found = find_cause(
            outcome.stderr_tail,
            list(outcome.exited.values()),
            [self._run.nodes[rank] for rank in self._group],
        )
        return RunError(found.message, node=found.node, remedy=f"{found.remedy}; {self._logs()}")

    def _latest_loss(self) -> CsdctlError | None:
        """Why a member of this group was lost; who was lost before it is no cause of what happens to it."""
        return next((error for rank, error in reversed(self._lost.items()) if rank in self._group), None)

    def _logs(self) -> str:
        return f"logs: {self._run.log_path(0).parent}"


def _reason(failed: Failed) -> CsdctlError:
    """Why a node that gave up is lost."""
    return NodeError(failed.message, node=failed.node, remedy=failed.remedy)


def _failure(failed: Failed) -> CsdctlError:
    kind = InputError if failed.exit_code == InputError.exit_code else RunError
    return kind(failed.message, node=failed.node, remedy=failed.remedy)


def _fatal(error: CsdctlError) -> CsdctlError:
    if isinstance(error, RunError):
        return error
    return RunError(error.message, node=error.node, remedy=error.remedy)
