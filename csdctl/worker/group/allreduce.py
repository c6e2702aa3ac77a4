"""MPI's own non-blocking allreduce."""

from typing import Any

from csdctl.worker.group.mpi import World
from csdctl.worker.group.tails import ExpectedTails
from csdctl.worker.group.waiting import OnWait, ignore_wait, wait_sleeping


class Allreduce:
    """Implements `collective.Collective`."""

    def __init__(self, world: World, local: Any, total: Any) -> None:
        self._world = world
        self._local = local
        self._total = total
        self.is_sending = False

    def post_receives(self) -> None:
        """Do nothing: MPI posts its own."""

    def progress(self) -> None:
        """Do nothing: MPI progresses in `sum`."""

    def flush(self, on_wait: OnWait = ignore_wait) -> None:
        """Do nothing: a completed allreduce has left."""

    def sum(self, on_wait: OnWait = ignore_wait, expected: ExpectedTails | None = None) -> None:
        """Sum `local` over all ranks into `total` on all ranks; no rank sees another one's vector."""
        wait_sleeping(self._world.start_sum(self._local, self._total), on_wait)

    def find_not_finite(self) -> list[int]:
        """Return nothing: it is not known."""
        return []
