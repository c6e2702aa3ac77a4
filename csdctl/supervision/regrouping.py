"""After a group is lost: find the ranks that can form the next one."""

import time
from collections.abc import Iterable

from csdctl.errors import CsdctlError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.launch.mpi_job import JobOutcome
from csdctl.supervision import failures
from csdctl.supervision.group import GroupState
from csdctl.supervision.inbox import Inbox
from csdctl.supervision.membership import Membership
from csdctl.supervision.rank_process import ProcessEnded, RankMessage
from csdctl.supervision.rank_processes import RankProcesses
from csdctl.supervision.run_setup import RunSetup
from csdctl.worker.protocol.events import Failed, Finished, Misbehaved, Progress, Ready
from csdctl.worker.protocol.orders import Ping

LATE_REPORTS = 5
"""Reports of rank 0 that cannot all have waited in a pipe: it trains after others have finished."""


class Regrouping:
    """Polls the members of a lost group, and decides whether and with which ranks the run continues."""

    def __init__(
        self, setup: RunSetup, processes: RankProcesses, inbox: Inbox, membership: Membership
    ) -> None:
        self._setup = setup
        self._patience = setup.patience
        self._processes = processes
        self._inbox = inbox
        self._membership = membership
        self._num_failed = 0
        """Groups that were lost since the last progress."""

    def record_progress(self) -> None:
        """Forget the groups that failed before: the current one makes progress, or has lost a culprit."""
        self._num_failed = 0

    def find_members(self, group: GroupState, reason: str, outcome: JobOutcome | None) -> list[int] | None:
        """Return the ranks of the next group, None when the lost one finishes without another.

        `outcome` is that of the lost group's mpirun. Raise the error of the run if it cannot continue.
        """
        self._num_failed += 1
        suspects = _find_suspects(group)
        group.joined = set()
        members = set(group.ranks)
        self._poll(group)
        self.settle_completion(group)
        if self._membership.finished:
            if group.unlinked or not members <= self._membership.present(members) | self._membership.finished:
                raise self.incomplete(group, reason)
            return None  # all members were about to finish, and no longer need links
        cause = self._find_cause(group, outcome)
        if cause and cause.node:
            suspects = {rank for rank in members if self._membership.nodes[rank] == cause.node}
        elif not self._membership.has_trained:
            self._drop(suspects, None)
        if not self._membership.has_trained or self._num_failed > self._patience.max_attempts:
            raise cause or failures.no_group(reason, self._setup.log_directory)
        if self._num_failed == self._patience.max_attempts:
            self._drop(suspects, cause)
        if 0 not in self._membership.present(members):
            self._await_host()
        left = sorted(self._membership.present(members))
        self._check_num_nodes(left)
        return left

    def settle_completion(self, group: GroupState) -> None:
        """Mark the ranks as lost that reported their completion while rank 0 was still training.

        All ranks end their last step together, and close their links together, before any rank reports its
        completion. Rank 0 is on the host: when it has lost its link or goes on training, the others have left
        too early. Wait until it tells.
        """
        deadline = time.monotonic() + self._patience.mpirun_exit_s
        num_steps = 0
        while self._membership.finished and self._is_undecided(group) and time.monotonic() < deadline:
            message = self._inbox.next(self._patience.poll_s)
            self._handle(message)
            num_steps += isinstance(message, Progress) and message.rank == 0
            if num_steps == LATE_REPORTS:
                break
        if 0 not in self._membership.finished and (0 in group.unlinked or num_steps == LATE_REPORTS):
            for rank in sorted(self._membership.finished):
                self._membership.withdraw(rank)

    def _is_undecided(self, group: GroupState) -> bool:
        """Return whether rank 0 has neither finished nor lost its link, and can still do either."""
        return 0 in self._membership.present() - self._membership.finished and 0 not in group.unlinked

    def incomplete(self, group: GroupState, reason: str) -> CsdctlError:
        """Return the error of a run that cannot continue because some ranks have finished and left."""
        missing = [
            self._membership.nodes[rank] for rank in group.ranks if rank not in self._membership.finished
        ]
        loss = self._membership.latest_loss(group.ranks)
        return failures.incomplete(reason, loss, missing, self._setup.log_directory)

    def _poll(self, group: GroupState) -> None:
        """Ping all members, and mark as lost those that exit, fail or do not answer."""
        start = time.monotonic()
        members = set(group.ranks)
        for rank in self._membership.present(members):
            self._processes.send(rank, Ping(group.generation))
        limit_s = self._patience.answer_s
        waiting: set[int] = set()
        while time.monotonic() - start < limit_s:
            waiting = {
                rank
                for rank in self._membership.present(members - self._membership.finished)
                if not group.has_answered_since(rank, start)
            }
            if not waiting and time.monotonic() - start > self._patience.settle_s:
                return
            if len(waiting) == 1 and len(members) > 1:
                limit_s = self._patience.last_answer_limit_s(group.answer_delays_s(start))
            left_s = start + (limit_s if waiting else self._patience.settle_s) - time.monotonic()
            self._handle(self._inbox.next(max(0.0, left_s)))
        for rank in waiting:
            self._membership.mark_lost(rank, failures.no_answer(rank, self._membership.nodes[rank]))

    def _handle(self, message: RankMessage | None) -> None:
        """Handle the messages that matter while no group exists."""
        if isinstance(message, ProcessEnded):
            self._membership.handle_exit(message)
        elif isinstance(message, Failed):
            if message.rank == 0:
                raise failures.as_run_failure(message)
            if message.rank in self._membership.finished:
                self._membership.note_late_failure(message.rank, failures.as_loss(message))
            self._membership.mark_lost(message.rank, failures.as_loss(message))
        elif isinstance(message, Misbehaved):
            if self._membership.handle_misbehaved(message):
                self.record_progress()
        elif isinstance(message, Finished):
            self._membership.mark_finished(message.rank)
        elif isinstance(message, Ready) and message.rank in self._membership.restarting:
            self._membership.readmit(message)

    def _drop(self, suspects: Iterable[int], cause: CsdctlError | None) -> None:
        """Mark the ranks as lost with which groups fail although they answer."""
        for rank in sorted(self._membership.present(suspects)):
            named = (
                cause if cause and cause.node else failures.keeps_failing(rank, self._membership.nodes[rank])
            )
            self._membership.mark_lost(rank, named)

    def _find_cause(self, group: GroupState, outcome: JobOutcome | None) -> CsdctlError | None:
        """Return why the group was lost: the loss of a member, or what mpirun printed.

        A rank that was lost before this group was formed cannot be the cause of the group's loss.
        """
        if loss := self._membership.latest_loss(group.ranks):
            return loss
        if outcome is None:
            return None
        nodes = [self._membership.nodes[rank] for rank in group.ranks]
        return failures.mpirun_failure(outcome, nodes, self._setup.log_directory)

    def _await_host(self) -> None:
        """Wait until rank 0 has restarted on this machine: no group can train without it."""
        deadline = time.monotonic() + self._patience.start_s
        while 0 not in self._membership.ready:
            self._handle(self._inbox.next(self._patience.poll_s))
            if time.monotonic() > deadline or self._membership.is_exhausted(0):
                loss = self._membership.latest_loss([0])
                raise failures.as_run_error(loss or RunError("rank 0 cannot be restarted"))

    def _check_num_nodes(self, left: list[int]) -> None:
        num_nodes = sum(self._membership.nodes[rank] != HOST_NAME for rank in left)
        if num_nodes >= self._setup.min_nodes:
            return
        if not self._setup.is_resumable:
            raise failures.ranks_missing(len(self._membership.nodes), self._membership.losses)
        raise failures.too_few_nodes(
            num_nodes, self._setup.min_nodes, self._membership.losses, self._setup.run_id
        )


def _find_suspects(group: GroupState) -> set[int]:
    """Return the ranks because of which the group was lost, as far as rank 0 is none of them."""
    missing = set(group.ranks) - group.joined
    if missing:
        return set() if 0 in missing else missing
    return {group.first_unlinked} if group.first_unlinked else set()
