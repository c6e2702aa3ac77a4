"""Supervise a run: start the ranks, form groups, handle messages, await the exits.

Ranks are started over SSH and keep running; mpirun's links connect the present ranks as a group. When a
rank or a link is lost, the group ends: ranks that no longer answer are left out, and a new group resumes
from the last completed step. A lost node rejoins at the end of an epoch (docs/decisions/0012).
"""

import time
from collections.abc import Callable, Iterable, Sequence

from csdctl.launch.mpi_job import JobOutcome
from csdctl.supervision import failures
from csdctl.supervision.group import GroupState
from csdctl.supervision.inbox import Inbox
from csdctl.supervision.links import Links
from csdctl.supervision.liveness import Liveness
from csdctl.supervision.membership import Membership
from csdctl.supervision.rank_process import ProcessEnded, RankMessage
from csdctl.supervision.rank_processes import RankProcesses, Restarted
from csdctl.supervision.regrouping import Regrouping
from csdctl.supervision.run_setup import RunSetup
from csdctl.worker.protocol.events import (
    EpochEnd,
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    Misbehaved,
    Paused,
    Pong,
    Progress,
    Ready,
    WaitingFor,
)
from csdctl.worker.protocol.orders import FormGroup, PauseAtEpochEnd, Stop

USER, CALLBACK = "user", "callback"
"""Who has stopped a run (`Supervisor.stopped_by`)."""


class Supervisor:
    """One run; call `run` once."""

    def __init__(self, setup: RunSetup, record: Callable[[Event], None]) -> None:
        """`record` is called with every event, in order, by the thread that calls `run`."""
        self._setup = setup
        self._patience = setup.patience
        self._record = record
        self._processes = RankProcesses(
            setup.start_rank, setup.restart_rank, setup.patience.restart_interval_s
        )
        self._inbox = Inbox(self._processes.next, self._record_arrival)
        self._membership = Membership(
            setup.nodes, self._processes, self._inbox, record, setup.patience.max_restarts
        )
        self._liveness = Liveness(self._processes, self._membership, setup.patience)
        self._regrouping = Regrouping(setup, self._processes, self._inbox, self._membership)
        self._group = GroupState(0, (), time.monotonic())
        self._links: Links | None = None
        self._collectives: dict[tuple[int, ...], str] = {}
        """The collective that a group of these ranks has chosen."""
        self.stopped_by = ""
        """USER or CALLBACK, who has asked for the end of the run; '' if nobody has."""
        self._is_regrouping = False
        self.outcomes: list[JobOutcome] = []
        """How each mpirun ended."""

    def run(self) -> None:
        """Train to the end; raise RunError, DeadlineError or InputError.

        A second Ctrl-C raises KeyboardInterrupt.
        """
        try:
            self._start()
            self._form_group(sorted(self._processes.ranks))
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
            if self.stopped_by or not self._membership.has_trained or self._is_regrouping:
                raise
            self.stopped_by = USER
            self._inbox.requeue_unhandled()
            self._processes.send(0, Stop())

    def _stop_if_asked(self) -> None:
        """Let the ranks finish their step when a callback has asked for the end of the run."""
        if self._setup.should_stop() and self._membership.has_trained and not self.stopped_by:
            self.stopped_by = CALLBACK
            self._processes.send(0, Stop())

    def _start(self) -> None:
        """Start all ranks and wait until they are ready; before the first step every failure is fatal."""
        for rank in range(len(self._setup.nodes)):
            if rank not in self._setup.absent:
                self._processes.start(rank)
        deadline = time.monotonic() + self._patience.start_s
        while self._membership.ready < self._processes.ranks:
            message = self._inbox.next(self._patience.start_poll_s)
            if isinstance(message, ProcessEnded):
                raise failures.as_run_error(message.error)
            if isinstance(message, Failed):
                raise failures.as_run_failure(message)
            if time.monotonic() > deadline:
                raise failures.start_overdue(self._nodes_of(self._processes.ranks - self._membership.ready))

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

    def _form_group(self, ranks: Sequence[int]) -> None:
        group = self._group = GroupState(self._group.generation + 1, tuple(ranks), time.monotonic())
        collective = self._collectives.get(group.ranks, self._setup.collective)
        if self.stopped_by:  # rank 0 may be a new process, which has not received the order
            self._processes.send(0, Stop())
        for rank in group.ranks:
            self._processes.send(rank, FormGroup(group.generation, group.ranks, collective))
        if len(group.ranks) > 1:
            self._links = self._setup.start_links(group.ranks, group.generation)
        self._is_regrouping = False

    def _take_turn(self) -> None:
        """Handle one message, and check whether the group is still alive."""
        self._stop_if_asked()
        self._handle(self._inbox.next(self._patience.poll_s))
        self._inbox.mark_handled()
        if self._links and not self._membership.finished and not self._group.paused:
            self._check_links(self._links)
        self._liveness.ping_late_ranks(self._group)
        self._check_stalled_ranks()
        is_silent = self._patience.is_silent(self._group.last_progress, time.monotonic())
        if is_silent and not self._regroup_without_awaited():
            raise failures.silent(self._setup.log_directory)

    def _handle(self, message: RankMessage | None) -> None:
        """Handle a message; handling it twice is harmless."""
        if isinstance(message, ProcessEnded):
            self._handle_exit(message)
        elif isinstance(message, Failed):
            self._handle_failure(message)
        elif isinstance(message, Joined | Paused | LinkLost):
            self._handle_membership(message)
        elif isinstance(message, Progress | EpochEnd) and message.rank == 0:
            self._handle_progress(message)
        elif isinstance(message, Finished):
            self._membership.mark_finished(message.rank)
        elif isinstance(message, Misbehaved):
            self._handle_misbehaved(message)
        elif isinstance(message, WaitingFor):
            self._handle_waiting(message)
        elif isinstance(message, Ready) and message.rank in self._membership.restarting:
            self._membership.readmit(message)
            if self._group.have_all_joined:
                self._request_pause()

    def _handle_progress(self, report: Progress | EpochEnd) -> None:
        self._regrouping.record_progress()
        if self._group.have_all_joined:
            self._membership.record_progress(report, self._group.ranks)

    def _handle_exit(self, ended: ProcessEnded) -> None:
        self._membership.handle_exit(ended)
        if ended.rank in self._group.ranks and ended.rank not in self._membership.finished:
            self._regroup(f"{ended.node} is lost")

    def _handle_failure(self, failed: Failed) -> None:
        """Continue without a rank that failed on its own, unless all ranks would fail for the same reason."""
        if failed.rank in self._membership.finished:
            self._membership.note_late_failure(failed.rank, failures.as_loss(failed))
            return
        if failed.rank not in self._group.ranks:  # it has restarted, and the others train without it
            self._membership.mark_lost(failed.rank, failures.as_loss(failed))
            return
        if failed.rank == 0 or not self._membership.has_trained:
            raise failures.as_run_failure(failed)
        # All ranks see the same sums: if they are the cause, rank 0 fails too.
        deadline = time.monotonic() + self._patience.settle_s
        while (left_s := deadline - time.monotonic()) > 0:
            message = self._inbox.next_new(left_s)
            if isinstance(message, Failed) and message.rank == 0:
                raise failures.as_run_failure(message)
            if message:
                self._inbox.postpone(message)
        self._membership.mark_lost(failed.rank, failures.as_loss(failed))
        self._regroup(f"{failed.node} failed")

    def _handle_membership(self, message: Joined | Paused | LinkLost) -> None:
        """Handle what a rank says about its group; what it said about an earlier one no longer matters."""
        if isinstance(message, LinkLost):
            if message.rank in self._group.unlinked:
                self._regroup("the connection between the ranks was lost")
        elif message.generation != self._group.generation:
            return
        elif isinstance(message, Joined):
            self._handle_joined(message)
        else:
            self._handle_paused(message)

    def _handle_joined(self, joined: Joined) -> None:
        self._group.joined.add(joined.rank)
        if joined.rank == 0:  # what a node says must not choose for all
            self._collectives[self._group.ranks] = joined.collective
        if self._group.have_all_joined:
            self._membership.has_trained = True
            self._request_pause()

    def _handle_paused(self, paused: Paused) -> None:
        if not self._group.is_pausing and paused.rank != 0:
            self._membership.mark_lost(paused.rank, failures.paused_early(paused.rank, paused.node))
            self._regroup(f"{paused.node} left")
            return
        self._group.is_pausing = True
        self._group.paused.add(paused.rank)
        if self._group.have_all_paused:
            self._end_links()
            self._form_group(sorted(self._membership.present()))

    def _handle_misbehaved(self, message: Misbehaved) -> None:
        if message.culprit in self._group.ranks and (node := self._membership.handle_misbehaved(message)):
            self._regrouping.record_progress()  # the next group is another one
            self._regroup(f"{node} sent what it must not")

    def _handle_waiting(self, message: WaitingFor) -> None:
        ranks = [self._setup.nodes.index(node) for node in message.nodes]
        if message.rank == 0:
            self._group.awaited = set(ranks) & set(self._group.ranks)
        self._liveness.ping(self._group, ranks or self._group.ranks)

    def _request_pause(self) -> None:
        """Have the group end with the epoch if a rank waits to join.

        Only once all members have joined: a rank that receives a new group forgets a pause requested before.
        """
        if self._membership.present() - set(self._group.ranks):
            self._group.is_pausing = True
            self._processes.send(0, PauseAtEpochEnd())

    def _regroup(self, reason: str) -> None:
        """End the group, and form a new one of the ranks that are left."""
        self._regrouping.settle_completion(self._group)
        if self._membership.finished:
            raise self._regrouping.incomplete(self._group, reason)
        outcome = self._end_links()
        members = self._regrouping.find_members(self._group, reason, outcome)
        if members is None:
            self._is_regrouping = False
        else:
            self._form_group(members)

    def _end_links(self) -> JobOutcome | None:
        self._is_regrouping = True  # until the next group exists, an interrupt ends the run
        outcome = self._links.end() if self._links else None
        self._links = None
        if outcome:
            self.outcomes.append(outcome)
        return outcome

    def _check_links(self, links: Links) -> None:
        """Regroup if mpirun has failed, or has not connected the ranks in time."""
        num_ranks = len(self._group.ranks)
        if links.has_failed(self._patience.mpirun_exit_s):
            self._regroup("mpirun exited")
        elif len(self._group.joined) < num_ranks:
            limit_s = self._patience.join_limit_s(num_ranks)
            if time.monotonic() - links.started > limit_s and not self._regroup_without_awaited():
                self._regroup(f"the ranks did not connect to each other within {limit_s:.0f} s")

    def _regroup_without_awaited(self) -> bool:
        """Regroup without the ranks that rank 0 waits for; return False unless it named some, but not all."""
        awaited = self._group.awaited
        if not 0 < len(awaited) < len(self._group.ranks) - 1 or self._membership.finished:
            return False
        for rank in awaited:
            self._membership.mark_lost(rank, failures.nothing_sent(self._setup.nodes[rank]))
        self._regroup(f"{', '.join(self._nodes_of(awaited))} sent nothing")
        return True

    def _check_stalled_ranks(self) -> None:
        """Regroup without the ranks that have not answered a ping for too long."""
        if stalled := self._liveness.mark_stalled_ranks(self._group):
            self._regroup(f"{', '.join(self._setup.nodes[rank] for rank in stalled)} did not answer")

    def _await_exits(self) -> None:
        """Wait until every rank has exited cleanly: only then is the run complete."""
        deadline = time.monotonic() + self._patience.exit_s
        while left := set(self._group.ranks) & self._processes.ranks:
            message = self._inbox.next(self._patience.poll_s)
            if isinstance(message, ProcessEnded):
                self._membership.handle_exit(message)
            if time.monotonic() > deadline:
                raise failures.exit_overdue(self._nodes_of(left), self._setup.log_directory)

    def _nodes_of(self, ranks: Iterable[int]) -> list[str]:
        return [self._setup.nodes[rank] for rank in sorted(ranks)]
