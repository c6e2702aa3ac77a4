"""Supervise a run: start the ranks and their links, note who takes part, restart what is lost.

Ranks are started over SSH. Each node has a link of its own, an MPI job of two processes. The hub beside
rank 0 knows who takes part, and rank 0 reports it (`Joined`). When a process, a link or a machine is lost,
the others go on without it. Here it is restarted, and rank 0 lets it in again (docs/decisions/0052).

`ACTIONS`, at the end of this file, says what each message leads to.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from csdctl.errors import CsdctlError, DeadlineError, InputError, NodeError, RunError
from csdctl.fleet.names import format_node_names
from csdctl.launch.mpi_job import JobOutcome, add_mpirun_traffic, explain_link
from csdctl.supervision.rank_processes import ProcessEnded, RankMessage, RankProcesses, Restarted
from csdctl.supervision.run_setup import Conditions, Link, RankStarter
from csdctl.worker.protocol import events
from csdctl.worker.protocol.orders import Begin, OpenHub, Ping, Stop
from csdctl.worker.protocol.run_spec import CHECK

USER, CALLBACK = "user", "callback"
"""Who has stopped a run (`Supervisor.stopped_by`)."""
STOPPED_S = 5.0
"""A wait for a message that is longer by this much: csdctl itself was stopped, and messages are late."""
MAX_PAUSES = 10
"""Pauses of `Patience.relink_s` before a link is started again, at most."""
MAX_DOUBLINGS = 5
"""Doublings of `Patience.restart_interval_s` before the process of a rank is started again, at most."""
EARLY = "reported its completion before the run was complete"
PROGRESS = (events.Ready, events.Joined, events.Progress, events.Evaluating, events.EpochEnd, events.Finished)
"""Events of rank 0 that show that the run does not hang."""


def as_run_failure(failed: events.Failed, logs: object) -> CsdctlError:
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


@dataclass
class RankState:
    """The known state of one rank."""

    is_ready: bool = False
    """Whether its process has loaded what it needs."""
    is_member: bool = False
    """Whether it takes part, as rank 0 has said last."""
    since: float = 0.0
    """Since when, in monotonic seconds."""
    link: Link | None = None
    link_after: float = 0.0
    loss: CsdctlError | None = None
    """Why it is lost, until it takes part again."""
    departure: tuple[float, str] | None = None
    """When rank 0 went on without it, in monotonic seconds, and why, until a better cause is known."""
    num_losses: int = 0
    """Losses of its process since the run made progress with it: the end of an epoch, or a while."""
    num_link_losses: int = 0
    pinged: float | None = None
    """When it was pinged, until it answers."""
    heard: float = 0.0
    """When it last answered a ping, or became ready."""


class Supervisor:
    """One run. Call `run` once."""

    def __init__(
        self,
        starter: RankStarter,
        conditions: Conditions,
        record: Callable[[events.Event], None],
        late: Mapping[int, CsdctlError],
    ) -> None:
        """`record` is called with every event, in order, by the thread that calls `run`.

        `late`: ranks whose nodes cannot be reached yet, and why. They join once they can.
        """
        self._starter, self._conditions, self._record, self._late = starter, conditions, record, late
        self._patience = conditions.patience
        spec, mpirun = starter.spec, starter.mpirun
        self._nodes = [rank.node for rank in spec.ranks]
        self._servers = [rank.server for rank in spec.ranks]
        self._log_directory = mpirun.run.logs
        self._logs = f"logs: {self._log_directory}"
        reachable = {rank for rank, node in enumerate(self._nodes) if node in mpirun.sessions}
        self._ranks = {rank: RankState() for rank in sorted(reachable | late.keys())}
        self._processes = RankProcesses(
            starter.start, starter.restart, self._patience.restart_interval_s, self._record_arrival
        )
        self._is_check = spec.task.name == CHECK
        """Whether rank 0 begins by itself, and ranks that do not start are lost: a check of links."""
        self._has_trained = self._is_check
        """Whether all ranks have taken part once; until then every loss ends the run."""
        self._has_begun = False
        """Whether rank 0 knows with whom it begins."""
        self._finished: set[int] = set()
        self._last_progress = time.monotonic()
        """Of rank 0: no step ends without it. A node could report for ever."""
        self._awaited: set[int] = set()
        """The ranks that rank 0 has waited for since its last progress."""
        self._waiting_pinged = 0.0
        self.stopped_by = ""
        """USER or CALLBACK, who has asked for the end of the run; '' if nobody has."""
        self.mpirun_bytes: Counter[tuple[str, str, str]] = Counter()

    def run(self) -> None:
        """Train to the end. Raise RunError, DeadlineError, InputError. KeyboardInterrupt for the second."""
        try:
            self._start()
            while 0 not in self._finished:
                self._run_interruptible(self._take_turn)
            self._await_exits()
        finally:
            self._processes.close()
            for state in self._ranks.values():
                if state.link:
                    state.link.end()
            for rank in self._ranks:
                self._close_link(rank)

    def _run_interruptible(self, action: Callable[[], None]) -> None:
        """Let the ranks finish their step after the first Ctrl-C. The second one ends everything."""
        try:
            action()
        except KeyboardInterrupt:
            if self.stopped_by or not self._has_trained or not self._ranks[0].is_ready:
                raise
            self.stopped_by = USER
            self._processes.requeue_unhandled()
            self._processes.send(0, Stop())

    def _record_arrival(self, message: RankMessage | Restarted) -> None:
        if isinstance(message, Restarted):
            self._open_hub(message.rank)
            if message.rank == 0:
                self._processes.forget_epochs()
        elif isinstance(message, events.Event):
            state, now = self._ranks[message.rank], time.monotonic()
            if isinstance(message, events.Ready | events.Pong):
                state.heard, state.pinged = now, None
                state.is_ready |= isinstance(message, events.Ready)
            if isinstance(message, PROGRESS) and message.rank == 0:
                self._last_progress, self._awaited = now, set()
            if not isinstance(message, events.Pong):
                self._record(message)

    # Starting

    def _start(self) -> None:
        """Start all ranks and their links, until all take part. Before that every failure is fatal."""
        for rank, error in self._late.items():
            self._note_loss(rank, error)
            self._processes.restart(rank)
        for rank in self._ranks.keys() - self._late.keys():
            self._processes.start(rank)
            self._open_hub(rank)
        deadline = time.monotonic() + self._patience.start_s
        while 0 not in self._finished:
            self._take_turn()
            late = [rank for rank, state in self._ranks.items() if not (state.is_ready or state.loss)]
            if not late and self._has_trained:
                return
            if late and time.monotonic() > deadline:
                self._give_up_start(late)

    def _give_up_start(self, late: Sequence[int]) -> None:
        limit, remedy = f"within {self._patience.start_s:g} s", "raise the timeout, or check the rank's log"
        if not self._is_check or 0 in late:
            names = format_node_names(self._nodes[rank] for rank in sorted(late))
            raise DeadlineError(f"{names} did not start {limit}", remedy=f"{remedy}; {self._logs}")
        for rank in late:
            error = NodeError(f"its rank did not start {limit}", node=self._nodes[rank], remedy=remedy)
            self._lose(rank, error)

    def _open_hub(self, rank: int) -> None:
        if rank in (0, *self._servers) and len(self._nodes) > 1:
            self._processes.send(rank, OpenHub(self._starter.mpirun.hub_key))

    def _begin(self) -> None:
        """Let rank 0 begin with all ranks once they are ready. Alone in a check, or after its own loss."""
        there = [rank for rank, state in self._ranks.items() if not state.loss]
        is_ready = all(self._ranks[rank].is_ready for rank in (there if not self._has_trained else [0]))
        if self._has_begun or not is_ready:
            return
        self._has_begun = True
        if self.stopped_by:  # rank 0 may be a new process, which has not received the order
            self._processes.send(0, Stop())
        self._processes.send(0, Begin(tuple(there) if not self._has_trained else (0,)))

    # Turns

    def _take_turn(self) -> None:
        if self._conditions.should_stop() and self._has_trained and not self.stopped_by:
            self.stopped_by = CALLBACK
            self._processes.send(0, Stop())
        while order := self._conditions.next_order():
            self._processes.send(0, order)
            self._last_progress = time.monotonic()  # what is ordered may take as long as a step
        began = time.monotonic()
        message = self._processes.next(self._patience.poll_s)
        if (now := time.monotonic()) - began > self._patience.poll_s + STOPPED_S:
            self._last_progress = now
            for state in self._ranks.values():
                state.pinged = None
        if message is not None and (action := ACTIONS.get(type(message))):
            action(self, message)
        self._processes.mark_handled()
        for rank, state in list(self._ranks.items()):
            self._look_after_link(rank)
            if rank in self._finished or not state.departure:
                continue
            if time.monotonic() - state.departure[0] > self._patience.cause_s:
                remedy = f"check the node and its network; {self._logs}"
                error = NodeError(state.departure[1], node=self._nodes[rank], remedy=remedy)
                self._lose(rank, error, is_restarting=False)
        self._begin()
        self._ping_waiting_ranks()
        self._check_stalled_ranks()
        self._check_silence()

    def _look_after_link(self, rank: int) -> None:
        """Start the link of a rank that is ready, and note the end of one."""
        state, server = self._ranks[rank], self._hub_of(rank)
        if rank == 0 or self._finished & {0, rank}:
            return
        if state.link and state.link.has_ended:
            outcome = self._close_link(rank)
            error = explain_link(outcome, self._nodes[rank], self._logs)
            if outcome.is_clean and state.is_member:
                # Maybe the run is over, and the completion record follows.
                state.departure = time.monotonic(), error.message
            elif state.is_ready:
                self._lose_link(rank, error)
        elif state.link and not state.link.is_connected:
            if time.monotonic() - state.link.started > self._patience.link_s:
                state.link.end()
        elif state.is_ready and not (state.link or state.departure):
            is_server_ready = server in self._ranks and self._ranks[server].is_ready
            if is_server_ready and time.monotonic() >= state.link_after:
                self._start_link(rank)

    def _hub_of(self, rank: int) -> int:
        return self._servers[rank] if self._servers[rank] != rank else 0

    def _start_link(self, rank: int) -> None:
        try:
            self._ranks[rank].link = self._starter.start_link(rank)
        except CsdctlError as error:
            self._lose_link(rank, error)

    def _close_link(self, rank: int) -> JobOutcome:
        state = self._ranks[rank]
        link, state.link = state.link, None
        if link is None:
            return JobOutcome()
        link.end()
        outcome = link.wait()
        self.mpirun_bytes.update(add_mpirun_traffic(outcome, self._starter.mpirun.fleet))
        return outcome

    # Losses

    def _lose(self, rank: int, error: CsdctlError, *, is_restarting: bool = True) -> None:
        """Note the loss of a rank or of its link. Restart its process, or keep it and restart only the link.

        Raises the error of the run before any training, and when too few nodes are left.
        """
        if rank in self._finished:
            self._warn(rank, error.message)
        else:
            self._ranks[rank].num_losses += is_restarting
            if self._ranks[rank].loss is None:
                self._note_loss(rank, error)
                if not self._has_trained:
                    raise as_run_error(error)
        if is_restarting:
            self._drop(rank)
        self._check_num_nodes()

    def _lose_link(self, rank: int, error: CsdctlError) -> None:
        """Note the loss of a link, which is started again after a pause, however often it is lost."""
        state, server = self._ranks[rank], self._hub_of(rank)
        pause_s = self._patience.relink_s * min(state.num_link_losses, MAX_PAUSES)
        state.link_after = time.monotonic() + pause_s
        state.num_link_losses += server == 0 or self._ranks[server].is_member
        self._lose(rank, error, is_restarting=False)

    def _note_loss(self, rank: int, error: CsdctlError) -> None:
        state = self._ranks[rank]
        state.loss, state.is_member, state.departure = error, False, None
        self._record(events.NodeLost(rank, self._nodes[rank], error.message, error.remedy))

    def _drop(self, rank: int) -> None:
        """End the process of a rank and its link. Restart the process, after a pause if that failed often."""
        state = self._ranks[rank]
        self._processes.drop(rank)
        state.is_ready, state.pinged = False, None
        if state.link:
            state.link.end()
        if rank == 0:
            self._has_begun = False
        if rank in self._finished:
            return
        num_failed = state.num_losses - self._patience.max_restarts
        if num_failed <= 0:
            self._processes.restart(rank)
        elif rank == 0:
            raise as_run_error(state.loss or RunError("rank 0 cannot be restarted"))
        elif self._conditions.is_resumable:
            pause_s = self._patience.restart_interval_s * 2 ** min(num_failed - 1, MAX_DOUBLINGS)
            self._processes.restart(rank, pause_s)

    def _warn(self, rank: int, problem: str) -> None:
        self._record(events.Warned(rank, self._nodes[rank], f"{problem}, after the rank had finished"))

    def _check_num_nodes(self) -> None:
        # A rank that waits for another link is not gone: all do when rank 0 is lost. A run that cannot be
        # resumed, such as a trial, goes on with nobody who comes back.
        max_losses = self._patience.max_restarts if self._conditions.is_resumable else -1
        waiting = {
            rank
            for rank, state in self._ranks.items()
            if state.is_ready and max(state.num_losses, state.num_link_losses) <= max_losses
        }
        remaining = [
            rank for rank, state in self._ranks.items() if rank and (not state.loss or rank in waiting)
        ]
        if len(remaining) >= self._conditions.min_nodes or 0 in self._finished:
            return
        losses = [state.loss for state in self._ranks.values() if state.loss]
        if not self._conditions.is_resumable:  # such as a trial, which tries again with less memory
            raise as_run_error(losses[0])
        lost = "lost:\n" + "\n".join(f"  {error}" for error in losses)
        raise RunError(
            f"nodes left: {len(remaining)}, but at least {self._conditions.min_nodes} must take part; {lost}",
            remedy="fix the lost nodes, then resume from the last completed step: "
            f"csdctl train --resume {self._starter.spec.run_id}",
        )

    # Messages

    def _note_members(self, joined: events.Joined) -> None:
        members = {int(rank) for rank in joined.batch_sizes}
        for rank in self._finished - members if not self._has_trained else ():
            self._finished.remove(rank)
            self._lose(rank, NodeError(EARLY, node=self._nodes[rank]))
        for rank, reason in joined.lost:
            state = self._ranks.get(rank)
            if state and rank not in members and state.loss is None and state.is_member:
                state.is_member = False
                if rank in self._finished:
                    self._finished.remove(rank)
                    self._lose(rank, NodeError(EARLY, node=self._nodes[rank]))
                else:
                    state.departure = time.monotonic(), reason
        for rank in members & set(self._ranks):
            state = self._ranks[rank]
            if state.loss is not None:
                state.loss = None
                self._record(events.NodeBack(rank, self._nodes[rank]))
            if not state.is_member:
                state.is_member, state.since, state.departure = True, time.monotonic(), None
        self._has_trained = True

    def _note_progress(self, report: events.Progress | events.EpochEnd) -> None:
        """Renew the restarts of rank 0 after a step, and of others that have taken part long enough."""
        if report.rank == 0:
            self._ranks[0].num_losses = 0
            is_end = isinstance(report, events.EpochEnd)
            for state in self._ranks.values():
                if state.is_member and (is_end or time.monotonic() - state.since > self._patience.renew_s):
                    state.num_losses = state.num_link_losses = 0

    def _note_exit(self, ended: ProcessEnded) -> None:
        if ended.rank in self._finished:
            self._processes.drop(ended.rank)
            if not ended.is_clean:
                self._warn(ended.rank, ended.error.message)
        elif self._ranks[ended.rank].loss is None or self._ranks[ended.rank].is_ready:
            self._lose(ended.rank, ended.error)
        else:
            self._ranks[ended.rank].num_losses += 1
            self._drop(ended.rank)

    def _note_failure(self, failed: events.Failed) -> None:
        """Continue without a rank that failed on its own. Rank 0 fails for all."""
        if failed.rank == 0 or not (self._has_trained or self._ranks[failed.rank].loss):
            raise as_run_failure(failed, self._log_directory)
        self._lose(failed.rank, NodeError(failed.message, node=failed.node, remedy=failed.remedy))

    def _note_fault(self, report: events.Misbehaved) -> None:
        """Restart the rank that rank 0 has found at fault. Another rank could accuse any rank."""
        if report.rank == 0 and report.culprit in self._ranks and report.culprit:
            node = self._nodes[report.culprit]
            remedy = "look for NaN in the samples, failing memory, another TensorFlow, then for an intruder"
            self._lose(report.culprit, NodeError(report.message, node=node, remedy=remedy))

    def _note_waiting(self, message: events.WaitingFor) -> None:
        for node in message.nodes:
            rank = self._nodes.index(node)
            if message.rank in (0, self._servers[rank]):
                self._ping(rank)
            if message.rank == 0:
                self._awaited.add(rank)

    # Liveness

    def _ping(self, rank: int) -> None:
        state = self._ranks.get(rank)
        if state and state.is_ready and state.pinged is None:
            state.pinged = time.monotonic()
            self._processes.send(rank, Ping(1))

    def _ping_waiting_ranks(self) -> None:
        """Ping ranks that take no part, which exit without any order, and a silent rank 0."""
        now = time.monotonic()
        if now - max(self._last_progress, self._ranks[0].heard) > self._patience.ping_interval_s:
            self._ping(0)
        if now - self._waiting_pinged > self._patience.waiting_ping_s:
            self._waiting_pinged = now
            for rank, state in self._ranks.items():
                if not state.is_member:
                    self._ping(rank)

    def _check_stalled_ranks(self) -> None:
        now = time.monotonic()
        for rank, state in self._ranks.items():
            if state.pinged is not None and now - state.pinged > self._patience.stall_s:
                message = f"rank {rank} is stopped, or its machine hangs"
                self._lose(rank, NodeError(message, node=self._nodes[rank]))

    def _check_silence(self) -> None:
        silence_s = self._patience.silence_s
        if time.monotonic() - self._last_progress > silence_s:
            if awaited := self._awaited & set(self._ranks):
                self._last_progress, self._awaited = time.monotonic(), set()
                for rank in awaited:
                    text = f"rank {rank} has sent nothing for {silence_s:g} s, although its process runs"
                    self._lose(rank, NodeError(text, node=self._nodes[rank]))
                return
            if loss := self._ranks[0].loss:
                raise as_run_error(loss)
            raise DeadlineError(
                "no rank has completed a step for too long: the run hangs", remedy=f"see {self._logs}"
            )

    # Exiting

    def _await_exits(self) -> None:
        deadline = time.monotonic() + self._patience.exit_s
        while running := {rank for rank in self._processes.ranks if self._ranks[rank].is_member}:
            message = self._processes.next(self._patience.poll_s)
            if isinstance(message, events.Finished):
                self._finished.add(message.rank)
            elif isinstance(message, ProcessEnded):
                self._processes.drop(message.rank)
                if not message.is_clean:
                    self._warn(message.rank, message.error.message)
            if time.monotonic() > deadline:
                for rank in running:
                    self._warn(rank, f"rank {rank} did not exit")
                return


ACTIONS: Mapping[type[RankMessage], Callable[[Supervisor, Any], None]] = {
    events.Joined: Supervisor._note_members,
    events.Progress: Supervisor._note_progress,
    events.EpochEnd: Supervisor._note_progress,
    events.WaitingFor: Supervisor._note_waiting,
    events.Misbehaved: Supervisor._note_fault,
    events.Failed: Supervisor._note_failure,
    events.Finished: lambda it, event: it._finished.add(event.rank),  # rank 0's next Joined may contradict
    ProcessEnded: Supervisor._note_exit,
}
"""The consequence of each message of a rank; others change nothing."""
