"""Check whether the members of a group are alive while others wait for them."""

import time
from collections.abc import Iterable

from csdctl.supervision import failures
from csdctl.supervision.group import GroupState
from csdctl.supervision.membership import Membership
from csdctl.supervision.patience import Patience
from csdctl.supervision.rank_processes import RankProcesses
from csdctl.worker.protocol.orders import Ping


class Liveness:
    """Pings the members that others wait for, and marks those as lost that do not answer."""

    def __init__(self, processes: RankProcesses, membership: Membership, patience: Patience) -> None:
        self._processes = processes
        self._membership = membership
        self._patience = patience

    def ping(self, group: GroupState, ranks: Iterable[int]) -> None:
        """Ping those of `ranks` that are members and have no unanswered ping."""
        now = time.monotonic()
        for rank in ranks:
            if rank in group.ranks and rank not in group.pinged:
                group.pinged[rank] = now
                self._processes.send(rank, Ping(group.generation))

    def ping_late_ranks(self, group: GroupState) -> None:
        """Ping at intervals the members that keep finished or paused members waiting.

        A finished or paused rank no longer reports that it waits.
        """
        if not self._membership.finished and not group.paused:
            return
        late = set(group.ranks) - self._membership.finished - group.paused
        now = time.monotonic()
        self.ping(group, [rank for rank in late if self._patience.is_ping_due(group.last_message(rank), now)])

    def mark_stalled_ranks(self, group: GroupState) -> list[int]:
        """Mark as lost the ranks that have not answered a ping for too long, and return them."""
        group.drop_answered_pings()
        stalled = self._patience.stalled(group.pinged, time.monotonic())
        for rank in stalled:
            self._membership.mark_lost(rank, failures.stalled(rank, self._membership.nodes[rank]))
        return stalled
