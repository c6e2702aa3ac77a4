"""Collectives in which a waiting rank sleeps.

MPI's blocking calls poll without pause and burn the core that a slow node needs. Here only non-blocking
ones are used, tested with a sleep in between that grows with the time waited (docs/decisions/0003).

Two ways to sum, of which the fleet at hand chooses the faster by a short measurement: a star around rank
0, as PCIe is around the host, and MPI's own `Iallreduce`. Both give the same bits on all ranks and in every
run.
"""

import time
from collections.abc import Callable
from typing import Any

FIRST_SLEEP_S = 0.0001
SLEEP_GROWTH = 1.3
SHORT_SLEEP_S, LONGEST_SLEEP_S = 0.002, 0.005
SLEEP_SHARE = 0.05
"""In a long wait, a look after this share of the time it has lasted: waking costs a slow node more."""
QUIET_S = 0.05
"""Within this, nobody looks whether something else has happened."""
PIECE_SIZE = 1 << 18
"""Elements of a vector that travel as one message: 1 MiB of float32, below mpirun's eager limit."""

_UP, _DOWN = 1, 2
STAR, ALLREDUCE = "star", "allreduce"


def wait_sleeping(request: Any, meanwhile: Callable[[float], None] = lambda waited_s: None) -> None:
    """Return when an MPI request is done; `meanwhile` is called with the seconds waited, after each sleep."""
    started_s, pause_s = time.monotonic(), FIRST_SLEEP_S
    while not request.Test():
        waited_s = time.monotonic() - started_s
        time.sleep(pause_s)
        longest_s = min(LONGEST_SLEEP_S, max(SHORT_SLEEP_S, waited_s * SLEEP_SHARE))
        pause_s = min(longest_s, pause_s * SLEEP_GROWTH)
        if waited_s > QUIET_S:
            meanwhile(waited_s)


def init_mpi() -> tuple[Any, Any]:
    """mpi4py's MPI, and its world; enters MPI."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    return MPI, MPI.COMM_WORLD


class Star:
    """A sum that is gathered, added in order of rank and sent back by rank 0 (docs/decisions/0006).

    In pieces, so that a piece travels while the next is added. Rank 0 takes in what arrives before its own
    vector is there, and goes on as soon as the sum is there: that the others get it does not hold it up.
    """

    def __init__(self, world: Any, local: Any, total: Any) -> None:
        """`local` and `total`: contiguous float32 buffers of one size; numpy arrays on rank 0."""
        self._world = world
        self._local = local
        self._total = total
        self._pieces = [slice(start, start + PIECE_SIZE) for start in range(0, len(local), PIECE_SIZE)]
        self._is_expecting = False
        self._sending: list[Any] = []
        """Rank 0: requests by which the latest sum leaves `total`."""
        self._arriving: list[tuple[slice, int, Any]] = []
        """Rank 0: what is on its way, in the order in which it is added: piece, rank, request."""
        if world.rank == 0:
            import numpy

            self._add = numpy.add
            self._received = [numpy.empty_like(local) for _ in range(1, world.size)]
            # The rank may still read the last sum in `total` when the first vector of the next one arrives.
            self._partial = numpy.empty_like(local)

    def expect(self) -> None:
        """Rank 0: be ready for the others' vectors of the next sum."""
        if self._world.rank or self._is_expecting:
            return
        self._is_expecting = True
        self._arriving = [
            (piece, rank, self._world.Irecv(buffer[piece], rank, _UP))
            for piece in self._pieces
            for rank, buffer in enumerate(self._received, start=1)
        ]

    def take_arrived(self) -> None:
        """Rank 0: add what has arrived, without waiting."""
        self._sending = [request for request in self._sending if not request.Test()]
        while self._arriving and self._arriving[0][2].Test():
            self._add_next()

    @property
    def is_sending(self) -> bool:
        """Rank 0: whether the latest sum is still on its way to somebody."""
        return bool(self._sending)

    @property
    def missing(self) -> list[int]:
        """Rank 0: the ranks of which something has not arrived yet."""
        return sorted({rank for _, rank, request in self._arriving if not request.Test()})

    def settle(self, meanwhile: Callable[[float], None] = lambda waited_s: None) -> None:
        """Wait until the latest sum has left."""
        for request in self._sending:
            wait_sleeping(request, meanwhile)
        self._sending = []

    def sum(self, meanwhile: Callable[[float], None] = lambda waited_s: None) -> None:
        """Sum `local` over all ranks into `total` on all ranks."""
        if self._world.rank == 0:
            self._add_and_send(meanwhile)
            return
        requests = [self._world.Irecv(self._total[piece], 0, _DOWN) for piece in self._pieces]
        sending = [self._world.Isend(self._local[piece], 0, _UP) for piece in self._pieces]
        for request in [*requests, *sending]:
            wait_sleeping(request, meanwhile)

    def _add_next(self) -> None:
        piece, rank, _ = self._arriving.pop(0)
        arrived = self._received[rank - 1][piece]
        if rank == 1:
            self._partial[piece] = arrived
        else:
            self._add(self._partial[piece], arrived, out=self._partial[piece])

    def _add_and_send(self, meanwhile: Callable[[float], None]) -> None:
        self.expect()
        self.settle(meanwhile)
        for piece in self._pieces:
            while self._arriving and self._arriving[0][0] == piece:
                wait_sleeping(self._arriving[0][2], meanwhile)
                self._add_next()
            if self._world.size == 1:
                self._total[piece] = self._local[piece]
            else:
                self._add(self._partial[piece], self._local[piece], out=self._total[piece])
            self._sending += [
                self._world.Isend(self._total[piece], rank, _DOWN) for rank in range(1, self._world.size)
            ]
        self._is_expecting = False


class Allreduce:
    """MPI's own non-blocking sum."""

    def __init__(self, world: Any, local: Any, total: Any) -> None:
        self._world = world
        self._local = local
        self._total = total
        self.is_sending = False
        self.missing: list[int] = []
        """Nobody knows whom an allreduce waits for."""

    def expect(self) -> None:
        """Nothing: MPI sees to it."""

    def take_arrived(self) -> None:
        """Nothing: MPI sees to it."""

    def settle(self, meanwhile: Callable[[float], None] = lambda waited_s: None) -> None:
        """Nothing: a sum that is there has left."""

    def sum(self, meanwhile: Callable[[float], None] = lambda waited_s: None) -> None:
        """Sum `local` over all ranks into `total` on all ranks."""
        wait_sleeping(self._world.Iallreduce(self._local, self._total), meanwhile)


def gather(world: Any, value: Any, meanwhile: Callable[[float], None] = lambda waited_s: None) -> list[Any]:
    """Every rank's small Python value, in order of rank, on all ranks; all first wait asleep for the last."""
    wait_sleeping(world.Ibarrier(), meanwhile)
    return list(world.allgather(value))


def choose_collective(
    world: Any, local: Any, total: Any, wanted: str = "", *, rounds: int = 2
) -> tuple[Star | Allreduce, str, float]:
    """The faster way to sum, its name, and the seconds of its quickest sum on the slowest rank.

    `wanted` names the way to take instead. Call on all ranks.
    """
    ways: dict[str, type[Star] | type[Allreduce]] = {STAR: Star, ALLREDUCE: Allreduce}
    measured: list[tuple[float, str, Star | Allreduce]] = []
    for name in (wanted,) if wanted in ways else ways:
        way = ways[name](world, local, total)
        # One more than is counted: the first one opens connections.
        times = [_time(world, way) for _ in range(rounds + 1)][1:]
        measured.append((max(gather(world, min(times))), name, way))
    seconds, name, way = min(measured, key=lambda one: one[0])
    return way, name, seconds


def _time(world: Any, way: Star | Allreduce) -> float:
    gather(world, None)
    started_s = time.perf_counter()
    way.sum()
    seconds = time.perf_counter() - started_s
    way.settle()
    return seconds
