"""Supervise a run: start the ranks, form groups, handle messages, await the exits.

Ranks are started over SSH and keep running; mpirun's links connect the present ranks as a group. When a
rank or a link is lost, the group ends: ranks that no longer answer are left out, and a new group resumes
from the last completed step. A lost node rejoins at the end of an epoch (docs/decisions/0012).

`GroupState` and `Membership` are the state of the ranks. `ACTIONS`, at the end of this file, says for each
phase of a run what each message leads to.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from csdctl.errors import CsdctlError, DeadlineError, InputError, NodeError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.names import format_node_names
from csdctl.launch.mpi_job import CHECK_WORKER, JobOutcome, find_cause, find_killed
from csdctl.supervision.rank_processes import ProcessEnded, RankMessage, RankProcesses, Restarted
from csdctl.supervision.run_setup import Links, RunSetup
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
    WaitingFor,
    Warned,
)
from csdctl.worker.protocol.orders import STAR, FormGroup, PauseAtEpochEnd, Ping, Stop


def as_loss(failed: Failed) -> CsdctlError:
    """Return why a rank that failed on its own is lost."""
    return NodeError(failed.message, node=failed.node, remedy=failed.remedy)


def as_run_failure(failed: Failed, logs: object) -> CsdctlError:
    """Return the error of a run, with `logs`, that ends because a rank failed: an InputError stays one."""
    error = InputError if failed.exit_code == InputError.exit_code else RunError
    remedy = failed.remedy.replace("this rank's log", f"{logs}/rank-{failed.rank}.log")
    node = "" if failed.message.startswith("recipe.") else failed.node
    return error(failed.message, node=node, remedy=remedy)


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

    def __init__(self, setup: RunSetup, processes: RankProcesses, record: Callable[[Event], None]) -> None:
        """`record` is called with every NodeLost and NodeBack."""
        self.nodes = setup.nodes
        self.servers = setup.servers or [0] * len(setup.nodes)
        self.ready: set[int] = set()
        self.restarting: set[int] = set()
        """Ranks with a new process that is not ready yet."""
        self.finished: set[int] = set()
        self.has_trained = False
        """Whether all ranks of a group have joined it once; until then every loss ends the run."""
        self._processes = processes
        self._record = record
        self._max_restarts = setup.patience.max_restarts
        self._losses: dict[int, CsdctlError] = {}
        """Why each rank is lost, the latest loss last."""
        self._num_losses: dict[int, int] = {}
        """Losses of each rank since the run last made progress with it."""
        self._position = self._position_at_loss = (0, 0)
        """Epoch and step that rank 0 reported last, and had reported when it was lost last."""

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

    def warn(self, rank: int, problem: str) -> None:
        """Report what went wrong in a rank that had reported completion: its part of the run is done."""
        self._record(Warned(rank, self.nodes[rank], f"{problem}, when it had finished its part of the run"))

    def withdraw(self, rank: int) -> None:
        """Mark a rank as lost whose completion record is not true, whether it still runs or not."""
        self.finished.discard(rank)
        early = f"rank {rank} reported its completion before the run was complete"
        self._lose(rank, NodeError(early, node=self.nodes[rank], remedy=CHECK_WORKER))

    def _lose(self, rank: int, error: CsdctlError) -> None:
        self._processes.drop(rank)
        self.ready.discard(rank)
        self.restarting.discard(rank)
        self._losses.pop(rank, None)  # keep the latest loss last
        self._losses[rank] = error
        node = self.nodes[rank]
        self._record(NodeLost(rank, node, str(error).removeprefix(f"{node}: ")))
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
            "look for NaN in the samples, then for failing memory, another TensorFlow, or an intruder",
        )
        return node

    def readmit(self, ready: Ready) -> None:
        """Record that a lost rank is ready again and can join the next group."""
        self.restarting.discard(ready.rank)
        self._losses.pop(ready.rank, None)
        self._record(NodeBack(ready.rank, ready.node))

    def handle_exit(self, ended: ProcessEnded) -> None:
        """Drop a rank that finished, or mark it as lost."""
        if ended.rank not in self.finished:
            self.mark_lost(ended.rank, ended.error)
            return
        self._processes.drop(ended.rank)
        if not ended.is_clean:
            self.warn(ended.rank, ended.error.message)


USER, CALLBACK = "user", "callback"
"""Who has stopped a run (`Supervisor.stopped_by`)."""
SLOWEST_FACTOR = 4
"""The last rank to answer a ping gets this many times the delay of the slowest other rank."""
STOPPED_S = 5.0
"""A wait for a message that is longer by this much: csdctl itself was stopped, and messages are late."""
LATE_REPORTS = 5
"""Reports of rank 0 that cannot all have waited in a pipe: it trains after others have finished."""


class Phase(Enum):
    """The phases of a run."""

    STARTING = "starting"
    """The processes of all ranks start. Every failure ends the run."""
    TRAINING = "training"
    """A group exists: it connects, trains, or pauses at the end of an epoch."""
    REGROUPING = "regrouping"
    """The group has ended. Its members are polled, and a new group is formed."""
    EXITING = "exiting"
    """All members of the group have finished. Their processes exit."""


class Supervisor:
    """One run; call `run` once."""

    def __init__(self, setup: RunSetup, record: Callable[[Event], None]) -> None:
        """`record` is called with every event, in order, by the thread that calls `run`."""
        self._setup = setup
        self._patience = setup.patience
        self._record = record
        self._phase = Phase.STARTING
        self._processes = RankProcesses(
            setup.start_rank, setup.restart_rank, setup.patience.restart_interval_s, self._record_arrival
        )
        self._membership = Membership(setup, self._processes, record)
        self._group = GroupState(0, (), time.monotonic())
        self._pinged_waiting_at = time.monotonic()
        self._links: Links | None = None
        self._collectives: dict[tuple[int, ...], str] = {}
        """The collective that a group of these ranks has chosen."""
        self._num_failed = 0
        """Groups that were lost since the last progress."""
        self._is_ungrouped = False
        """Whether the links of a group have ended and no other group exists: an interrupt ends the run."""
        self.stopped_by = ""
        """USER or CALLBACK, who has asked for the end of the run; '' if nobody has."""
        self.outcomes: list[JobOutcome] = []
        """The outcome of each mpirun."""

    def run(self) -> None:
        """Train to the end; raise RunError, DeadlineError or InputError.

        A second Ctrl-C raises KeyboardInterrupt.
        """
        try:
            self._start()
            self._form_group(sorted(self._membership.present()))
            while self._membership.finished < set(self._group.ranks):
                self._run_interruptible(self._take_turn)
            self._await_exits()
        finally:
            self._processes.close()
            self._end_links()

    def _run_interruptible(self, action: Callable[[], None]) -> None:
        """Let the ranks finish their step after the first Ctrl-C; the second one ends everything."""
        try:
            action()
        except KeyboardInterrupt:
            if self.stopped_by or not self._membership.has_trained or self._is_ungrouped:
                raise
            self._phase, self.stopped_by = Phase.TRAINING, USER
            self._processes.requeue_unhandled()
            self._processes.send(0, Stop())

    def _record_arrival(self, message: RankMessage | Restarted) -> None:
        """Update the state of the ranks from a new message, and record the message if it is an event."""
        if isinstance(message, Restarted):
            self._membership.restarting.add(message.rank)
        elif not isinstance(message, ProcessEnded):
            if isinstance(message, Ready):
                self._membership.ready.add(message.rank)
            self._group.record_arrival(message, time.monotonic())
            if not isinstance(message, Pong):
                self._record(message)

    def _act(self, message: RankMessage | None) -> None:
        """Do what a message leads to in this phase; doing it twice is harmless."""
        if message is not None and (action := ACTIONS[self._phase].get(type(message))):
            action(self, message)

    @property
    def _logs(self) -> str:
        return f"logs: {self._setup.log_directory}"

    def _nodes_of(self, ranks: Iterable[int]) -> list[str]:
        return [self._setup.nodes[rank] for rank in sorted(ranks)]

    # Starting

    def _start(self) -> None:
        """Start all ranks and wait until they are ready; before the first step every failure is fatal."""
        for rank in range(len(self._setup.nodes)):
            if rank not in self._setup.absent:
                self._processes.start(rank)
        deadline = time.monotonic() + self._patience.start_s
        while self._membership.ready < self._processes.ranks:
            self._act(self._processes.next(self._patience.poll_s))
            self._ping_waiting_ranks()
            if time.monotonic() > deadline:
                late = self._nodes_of(self._processes.ranks - self._membership.ready)
                raise DeadlineError(
                    f"{format_node_names(late)} did not start in time",
                    remedy="raise --start-timeout, or check the log of the rank",
                )

    def _end_run(self, message: ProcessEnded | Failed) -> None:
        if isinstance(message, ProcessEnded):
            raise as_run_error(message.error)
        raise as_run_failure(message, self._setup.log_directory)

    def _form_group(self, ranks: Sequence[int]) -> None:
        group = self._group = GroupState(self._group.generation + 1, tuple(ranks), time.monotonic())
        collective = self._collectives.get(group.ranks, self._setup.collective)
        if any(self._setup.servers) and len({self._setup.servers[rank] for rank in group.ranks}) == 1:
            collective = STAR  # only servers are connected with each other; nodes reach their server alone
        if self.stopped_by:  # rank 0 may be a new process, which has not received the order
            self._processes.send(0, Stop())
        for rank in group.ranks:
            self._processes.send(rank, FormGroup(group.generation, group.ranks, collective))
        if len(group.ranks) > 1:
            self._links = self._setup.start_links(group.ranks, group.generation)
        self._phase, self._is_ungrouped = Phase.TRAINING, False

    # Training

    def _take_turn(self) -> None:
        """Handle one message, and check whether the group is still alive."""
        if self._setup.should_stop() and self._membership.has_trained and not self.stopped_by:
            self.stopped_by = CALLBACK
            self._processes.send(0, Stop())
        began = time.monotonic()
        message = self._processes.next(self._patience.poll_s)
        if (now := time.monotonic()) - began > self._patience.poll_s + STOPPED_S:
            self._group.last_progress = now
            self._group.pinged.clear()
        self._act(message)
        self._processes.mark_handled()
        if self._links and not self._membership.finished and not self._group.paused:
            self._check_links(self._links)
        self._ping_late_ranks()
        self._ping_waiting_ranks()
        self._check_stalled_ranks()
        silent_s = time.monotonic() - self._group.last_progress
        if silent_s > self._patience.silence_s and not self._regroup_without_awaited():
            reason = "no rank has completed a step for too long"
            if self._num_failed or not self._links or self._membership.finished:
                raise DeadlineError(f"{reason}: the run hangs", remedy=f"see {self._logs}")
            self._regroup(reason)  # a connection may hang, with which no rank is at fault

    def _note_progress(self, report: Progress | EpochEnd) -> None:
        if report.rank != 0:
            return
        self._num_failed = 0
        if self._group.have_all_joined:
            self._membership.record_progress(report, self._group.ranks)

    def _lose_exited(self, ended: ProcessEnded) -> None:
        self._membership.handle_exit(ended)
        if ended.rank in self._group.ranks and ended.rank not in self._membership.finished:
            self._regroup(f"{ended.node} is lost")

    def _lose_failed(self, failed: Failed) -> None:
        """Continue without a rank that failed on its own, unless all ranks would fail for the same reason."""
        if failed.rank in self._membership.finished:
            self._membership.warn(failed.rank, failed.message)
            return
        if failed.rank not in self._group.ranks:  # it has restarted, and the others train without it
            self._membership.mark_lost(failed.rank, as_loss(failed))
            return
        if failed.rank == 0 or not self._membership.has_trained:
            raise as_run_failure(failed, self._setup.log_directory)
        # All ranks see the same sums: if they are the cause, rank 0 fails too.
        deadline = time.monotonic() + self._patience.settle_s
        while (left_s := deadline - time.monotonic()) > 0:
            message = self._processes.next_new(left_s)
            if isinstance(message, Failed) and message.rank == 0:
                raise as_run_failure(message, self._setup.log_directory)
            if message:
                self._processes.postpone(message)
        self._membership.mark_lost(failed.rank, as_loss(failed))
        self._regroup(f"{failed.node} failed")

    def _lose_link(self, lost: LinkLost) -> None:
        if lost.rank in self._group.unlinked:
            deadline = time.monotonic() + self._patience.settle_s
            while self._links and not self._links.has_failed(0.0) and time.monotonic() < deadline:
                time.sleep(0.02)  # mpirun is about to say whose process was killed
            self._regroup("the connection between the ranks was lost")

    def _join(self, joined: Joined) -> None:
        if joined.generation != self._group.generation:
            return
        self._group.joined.add(joined.rank)
        if joined.rank == 0:  # what a node says must not choose for all
            self._collectives[self._group.ranks] = joined.collective
        if self._group.have_all_joined:
            self._membership.has_trained = True
            self._request_pause()

    def _pause(self, paused: Paused) -> None:
        if paused.generation != self._group.generation:
            return
        if not self._group.is_pausing and paused.rank != 0:
            early = f"rank {paused.rank} left the group without an order"
            self._membership.lose(paused.rank, early, CHECK_WORKER)
            self._regroup(f"{paused.node} left")
            return
        self._group.is_pausing = True
        self._group.paused.add(paused.rank)
        if self._group.paused == set(self._group.ranks):
            self._end_links()
            self._form_group(sorted(self._membership.present()))

    def _drop_misbehaving(self, message: Misbehaved) -> None:
        if message.culprit in self._group.ranks and (node := self._membership.handle_misbehaved(message)):
            self._num_failed = 0  # the next group is another one
            if self._phase is Phase.TRAINING:
                self._regroup(f"{node} sent an invalid message")

    def _ping_awaited(self, message: WaitingFor) -> None:
        ranks = [self._setup.nodes.index(node) for node in message.nodes]
        if message.rank == 0:
            self._group.awaited = set(ranks) & set(self._group.ranks)
        else:
            own = {rank for rank in ranks if self._membership.servers[rank] == message.rank}
            self._group.awaited_by_server[message.rank] = own & set(self._group.ranks)
        self._ping(ranks or self._group.ranks)

    def _readmit(self, ready: Ready) -> None:
        """Let a lost rank that is ready again join at the end of the epoch, or the next group."""
        if ready.rank in self._membership.restarting:
            self._membership.readmit(ready)
            if self._phase is Phase.TRAINING and self._group.have_all_joined:
                self._request_pause()

    def _request_pause(self) -> None:
        """Have the group end with the epoch if a rank waits to join.

        Only once all members have joined: a rank that receives a new group forgets a pause requested before.
        """
        if self._membership.present() - set(self._group.ranks):
            self._group.is_pausing = True
            self._processes.send(0, PauseAtEpochEnd())

    # Liveness of a group

    def _ping(self, ranks: Iterable[int]) -> None:
        """Ping those of `ranks` that are members and have no unanswered ping."""
        now = time.monotonic()
        for rank in ranks:
            if rank in self._group.ranks and rank not in self._group.pinged:
                self._group.pinged[rank] = now
                self._processes.send(rank, Ping(self._group.generation))

    def _ping_late_ranks(self) -> None:
        """Ping at intervals the members that keep finished or paused members waiting.

        A finished or paused rank no longer reports that it waits.
        """
        group, finished = self._group, self._membership.finished
        if finished or group.paused:
            now = time.monotonic()
            late = set(group.ranks) - finished - group.paused
            due = now - self._patience.ping_interval_s
            self._ping(rank for rank in late if max(group.last_progress, group.answered.get(rank, 0.0)) < due)

    def _ping_waiting_ranks(self) -> None:
        """Ping at intervals the ranks that are ready and in no group: without any order, they exit."""
        now = time.monotonic()
        if now - self._pinged_waiting_at > self._patience.waiting_ping_s:
            self._pinged_waiting_at = now
            for rank in (self._membership.ready & self._processes.ranks) - set(self._group.ranks):
                self._processes.send(rank, Ping(self._group.generation))

    def _check_stalled_ranks(self) -> None:
        """Regroup without the ranks that have not answered a ping for too long."""
        group, now = self._group, time.monotonic()
        group.pinged = {
            rank: at for rank, at in group.pinged.items() if not group.has_answered_since(rank, at)
        }
        stalled = [rank for rank, at in group.pinged.items() if now - at > self._patience.stall_s]
        for rank in stalled:
            self._membership.lose(rank, f"rank {rank} is stopped, or its machine hangs")
        if stalled:
            self._regroup(f"{', '.join(self._setup.nodes[rank] for rank in stalled)} did not answer")

    def _check_links(self, links: Links) -> None:
        """Regroup if mpirun has failed, or has not connected the ranks in time."""
        num_ranks = len(self._group.ranks)
        if links.has_failed(self._patience.mpirun_exit_s):
            self._regroup("mpirun exited")
        elif len(self._group.joined) < num_ranks:
            limit_s = self._patience.join_s + self._patience.join_per_rank_s * num_ranks
            # Rank 0 may still evaluate.
            since = max(links.started, self._group.last_joined, self._group.last_progress)
            if time.monotonic() - since > limit_s and not self._regroup_without_awaited():
                self._regroup(f"the ranks did not connect to each other within {limit_s:.0f} s")

    def _regroup_without_awaited(self) -> bool:
        """Regroup without the ranks that rank 0 waits for; return False unless it named some, but not all."""
        awaited = self._group.find_awaited()
        if not 0 < len(awaited) < len(self._group.ranks) - 1 or self._membership.finished:
            return False
        for rank in awaited:
            self._membership.lose(
                rank,
                "has sent the other ranks nothing for too long, so all of them wait for it",
                "check the load of that machine and its network to the host; `csdctl doctor` tests it",
            )
        self._regroup(f"{', '.join(self._nodes_of(awaited))} sent nothing")
        return True

    # Regrouping

    def _regroup(self, reason: str) -> None:
        """End the group, and form a new one of the ranks that are left."""
        self._phase = Phase.REGROUPING
        self._settle_completion()
        if self._membership.finished:
            raise self._incomplete(reason)
        members = self._find_members(reason, self._end_links())
        if members is None:
            self._phase, self._is_ungrouped = Phase.TRAINING, False
        else:
            self._form_group(members)

    def _end_links(self) -> Sequence[JobOutcome]:
        self._is_ungrouped = True
        outcomes = self._links.end() if self._links else ()
        self._links = None
        self.outcomes.extend(outcomes)
        return outcomes

    def _find_members(self, reason: str, outcomes: Sequence[JobOutcome]) -> list[int] | None:
        """Return the ranks of the next group, None when the lost one finishes without another.

        `outcomes` are those of the lost group's mpiruns. Raise the error of the run if it cannot continue.
        """
        group, membership = self._group, self._membership
        self._num_failed += 1
        suspects = _find_suspects(group)
        group.joined = set()
        members = set(group.ranks)
        self._poll()
        self._settle_completion()
        if not members <= membership.present(members):
            self._num_failed = 0  # the next group is another one
        if membership.finished:
            if group.unlinked or not members <= membership.present(members) | membership.finished:
                raise self._incomplete(reason)
            return None  # all members were about to finish, and no longer need links
        cause = self._find_cause(outcomes)
        self._record_lost_link(outcomes, cause)
        if cause and cause.node:
            suspects = {rank for rank in members if membership.nodes[rank] == cause.node}
        elif not membership.has_trained:
            self._drop(suspects, None)
        if not membership.has_trained or self._num_failed > self._patience.max_attempts:
            raise cause or RunError(f"{reason}, and no new group could be formed", remedy=self._logs)
        if self._num_failed == self._patience.max_attempts:
            self._drop(suspects, cause)
        if 0 not in membership.present(members):
            self._await_host()
        left = sorted(membership.present(members))
        self._check_num_nodes(left)
        return left

    def _record_lost_link(self, outcomes: Sequence[JobOutcome], cause: CsdctlError | None) -> None:
        """Record whose link was lost, unless the loss of its rank is recorded."""
        nodes = self._membership.nodes
        ended = [link for link in map(find_killed, outcomes) if link]
        for link in ended:  # mpirun numbers the members of the group
            self._record(replace(link, rank=nodes.index(link.node)))
        for rank in self._membership.present(self._group.ranks):
            if cause and cause.node == nodes[rank] and not ended:
                why = cause.message.removeprefix("lost: ")
                self._record(Warned(rank, cause.node, f"{why}; all ranks connect again"))

    def _settle_completion(self) -> None:
        """Mark the ranks as lost that reported their completion while rank 0 was still training.

        All ranks end their last step together, and close their links together, before any rank reports its
        completion. Rank 0 is on the host: when it has lost its link or goes on training, the others have left
        too early. Wait until it tells.
        """
        deadline = time.monotonic() + self._patience.mpirun_exit_s
        num_steps = 0
        while self._membership.finished and time.monotonic() < deadline:
            undecided = self._membership.present() - self._membership.finished - self._group.unlinked
            if 0 not in undecided:
                break
            message = self._processes.next(self._patience.poll_s)
            self._act(message)
            num_steps += isinstance(message, Progress) and message.rank == 0
            if num_steps == LATE_REPORTS:
                break
        if 0 not in self._membership.finished and (0 in self._group.unlinked or num_steps == LATE_REPORTS):
            for rank in sorted(self._membership.finished):
                self._membership.withdraw(rank)

    def _incomplete(self, reason: str) -> CsdctlError:
        """Return the error of a run that cannot continue because some ranks have finished and left."""
        missing = self._nodes_of(set(self._group.ranks) - self._membership.finished)
        loss = self._membership.latest_loss(self._group.ranks)
        remedy = "the model is in the run directory"
        if 0 not in self._membership.finished:  # it alone saves models
            remedy = f"continue the run with `csdctl train --resume {self._setup.run_id}`"
        return RunError(
            f"{loss.message if loss else reason}\n"
            f"The run has no completion record from {format_node_names(missing)}",
            node=loss.node if loss else "",
            remedy=f"{remedy}; {self._logs}",
        )

    def _poll(self) -> None:
        """Ping all members, and mark as lost those that exit, fail or do not answer."""
        group, membership = self._group, self._membership
        start = time.monotonic()
        members = set(group.ranks)
        for rank in membership.present(members):
            self._processes.send(rank, Ping(group.generation))
        limit_s = self._patience.answer_s
        waiting: set[int] = set()
        while time.monotonic() - start < limit_s:
            waiting = {
                rank
                for rank in membership.present(members - membership.finished)
                if not group.has_answered_since(rank, start)
            }
            if not waiting and time.monotonic() - start > self._patience.settle_s:
                return
            if len(waiting) == 1 and len(members) > 1:
                slowest_s = max([0.0, *(answered - start for answered in group.answered.values())])
                least_s = max(self._patience.min_answer_s, SLOWEST_FACTOR * slowest_s)
                limit_s = min(self._patience.answer_s, least_s)
            left_s = start + (limit_s if waiting else self._patience.settle_s) - time.monotonic()
            self._act(self._processes.next(max(0.0, left_s)))
        for rank in waiting:
            gone = f"rank {rank} no longer answers (node down, link cut, or process stopped)"
            membership.lose(rank, gone, "check the node")

    def _leave_out_failed(self, failed: Failed) -> None:
        if failed.rank == 0:
            raise as_run_failure(failed, self._setup.log_directory)
        if failed.rank in self._membership.finished:
            self._membership.warn(failed.rank, failed.message)
        self._membership.mark_lost(failed.rank, as_loss(failed))

    def _drop(self, suspects: Iterable[int], cause: CsdctlError | None) -> None:
        """Mark the ranks as lost with which groups fail although they answer."""
        for rank in sorted(self._membership.present(suspects)):
            if cause and cause.node:
                self._membership.mark_lost(rank, cause)
                continue
            keeps_failing = f"rank {rank} does not join the others, or repeatedly loses its link"
            self._membership.lose(rank, keeps_failing, "check the node and its network")

    def _find_cause(self, outcomes: Sequence[JobOutcome]) -> CsdctlError | None:
        """Return why the group was lost: the loss of a member, or what mpirun printed.

        A rank that was lost before this group was formed cannot be the cause of the group's loss.
        """
        if loss := self._membership.latest_loss(self._group.ranks):
            return loss
        causes = [find_cause(outcome) for outcome in outcomes if outcome.stderr_tail or outcome.events]
        if not causes:
            return None
        found = next((cause for cause in causes if cause.node), causes[0])
        return RunError(found.message, node=found.node, remedy=f"{found.remedy}; {self._logs}")

    def _await_host(self) -> None:
        """Wait until rank 0 has restarted on this machine: no group can train without it."""
        deadline = time.monotonic() + self._patience.start_s
        while 0 not in self._membership.ready:
            self._act(self._processes.next(self._patience.poll_s))
            if time.monotonic() > deadline or self._membership.is_exhausted(0):
                loss = self._membership.latest_loss([0])
                raise as_run_error(loss or RunError("rank 0 cannot be restarted"))

    def _check_num_nodes(self, left: list[int]) -> None:
        num_nodes = sum(self._setup.nodes[rank] != HOST_NAME for rank in left)
        if num_nodes >= self._setup.min_nodes:
            return
        losses = self._membership.losses
        if losses and not self._setup.is_resumable:  # such as a trial, which tries again with less memory
            raise as_run_error(losses[0])
        lost = "lost:\n" + "\n".join(f"  {error}" for error in losses)
        raise RunError(
            f"nodes left: {num_nodes}, but --min-nodes is {self._setup.min_nodes}; {lost}",
            remedy="fix the lost nodes, then resume from the last completed step: "
            f"csdctl train --resume {self._setup.run_id}",
        )

    # Exiting

    def _await_exits(self) -> None:
        """Wait until every rank has exited. The run is complete, however they do."""
        self._phase = Phase.EXITING
        deadline = time.monotonic() + self._patience.exit_s
        while left := set(self._group.ranks) & self._processes.ranks:
            self._act(self._processes.next(self._patience.poll_s))
            if time.monotonic() > deadline:
                for rank in left:
                    self._membership.warn(rank, f"rank {rank} did not exit")
                return


def _find_suspects(group: GroupState) -> set[int]:
    """Return the ranks because of which the group was lost, as far as rank 0 is none of them."""
    missing = set(group.ranks) - group.joined
    if missing:
        return set() if 0 in missing else missing
    return {group.first_unlinked} if group.first_unlinked else set()


ACTIONS: Mapping[Phase, Mapping[type[RankMessage], Callable[[Supervisor, Any], None]]] = {
    Phase.STARTING: {ProcessEnded: Supervisor._end_run, Failed: Supervisor._end_run},
    Phase.TRAINING: {
        ProcessEnded: Supervisor._lose_exited,
        Failed: Supervisor._lose_failed,
        Ready: Supervisor._readmit,
        Joined: Supervisor._join,
        LinkLost: Supervisor._lose_link,
        Progress: Supervisor._note_progress,
        EpochEnd: Supervisor._note_progress,
        WaitingFor: Supervisor._ping_awaited,
        Misbehaved: Supervisor._drop_misbehaving,
        Paused: Supervisor._pause,
        Finished: lambda run, finished: run._membership.finished.add(finished.rank),
    },
    Phase.REGROUPING: {
        ProcessEnded: lambda run, ended: run._membership.handle_exit(ended),
        Failed: Supervisor._leave_out_failed,
        Ready: Supervisor._readmit,
        Misbehaved: Supervisor._drop_misbehaving,
        Finished: lambda run, finished: run._membership.finished.add(finished.rank),
    },
    Phase.EXITING: {ProcessEnded: lambda run, ended: run._membership.handle_exit(ended)},
}
"""What a message of a rank leads to in each phase. What is not in a phase's row changes nothing there: its
arrival was recorded by `Supervisor._record_arrival`."""
