"""Collectives: the ways to sum a vector over the ranks, and the choice of the fastest one.

A new collective is a subclass of `Collective`, registered in `COLLECTIVES`; its name goes into
`protocol.orders.COLLECTIVE_NAMES`, from which the command line takes the names that it accepts.
"""

import time
from collections import Counter
from itertools import cycle
from typing import Annotated, Any

from csdctl.worker.group.chunks import Chunk, divide
from csdctl.worker.group.messages import allgather, gather_values
from csdctl.worker.group.mpi import Incoming, OnWait, World, ignore_wait, is_complete, wait_sleeping
from csdctl.worker.group.values import ExpectedTails, PeerFaultError, SumSeconds
from csdctl.worker.protocol.json_codec import Count, MaxLength
from csdctl.worker.protocol.orders import ALLREDUCE, STAR

_UP, _DOWN = 1, 2


SumSizes = Annotated[tuple[tuple[Count, Count], ...], MaxLength(1 << 12)]
"""Of each sum of a step, in their order: its elements, and how many of them are sent as bfloat16."""


class Collective:
    """Sums float32 vectors over all ranks, here by MPI's own non-blocking allreduce; waiting ranks sleep.

    The result has the same bits on all ranks and in every run. Of an allreduce no rank sees another one's
    vector; a collective whose rank 0 receives single vectors overrides more than `sum`.
    """

    def __init__(self, world: World, local: Any, total: Any, sizes: SumSizes = ()) -> None:
        """`local` and `total`: contiguous float32 buffers of one size; numpy arrays on rank 0.

        `sizes`: of each sum of a step, at the start of the buffers: its elements, and how many of them are
        sent as bfloat16; by default one sum of all, as float32.
        """
        self._world, self._local, self._total = world, local, total
        self.sizes = tuple(sizes) or ((len(local), 0),)
        self._next_size = cycle(self.sizes)

    @property
    def is_sending(self) -> bool:
        """Whether the latest sum is still on its way to some rank."""
        return False

    def post_receives(self) -> None:
        """Post receives for the vectors of the next sum."""

    def progress(self) -> None:
        """Process what has arrived, without waiting."""

    def flush(self, on_wait: OnWait = ignore_wait) -> None:
        """Wait until the latest sum has left."""

    def sum(self, on_wait: OnWait = ignore_wait, expected: ExpectedTails | None = None) -> None:
        """Sum the next vector of a step, in `local`, over all ranks into `total` on all ranks.

        A collective in which rank 0 sees single vectors compares them with what it has `expected`, and
        raises PeerFaultError before any other rank has the whole sum.
        """
        size, _ = next(self._next_size)
        summed = slice(size)
        wait_sleeping(self._world.start_sum(self._local[summed], self._total[summed]), on_wait)

    def find_not_finite(self) -> list[int]:
        """Return the other ranks whose latest vectors are not finite, on rank 0; [] where that is unknown."""
        return []


class Star(Collective):
    """Rank 0 gathers, adds in order of rank, and sends the sum back (docs/decisions/0006).

    It suits a host with its devices: all traffic passes the host anyway. Vectors are sent in chunks, so that
    a chunk is sent while the next is added. Rank 0 adds vectors that arrive before its own vector is ready,
    and continues as soon as it has the sum: it does not wait until the other ranks have received it. No rank
    has the whole sum before rank 0 has compared the end of every vector with what it expects.
    """

    def __init__(self, world: World, local: Any, total: Any, sizes: SumSizes = ()) -> None:
        super().__init__(world, local, total, sizes)
        self._next_chunks = cycle([divide(*size) for size in self.sizes])
        self._chunks: list[Chunk] = []
        """Rank 0: those of the next sum, as soon as its receives are posted."""
        self._latest: list[Chunk] = []
        """Rank 0: those of the latest sum."""
        self._sending: list[Any] = []
        """Rank 0: requests by which the latest sum leaves `total`."""
        self._arriving: list[tuple[Chunk, int, Incoming]] = []
        """Rank 0: posted receives, in the order in which they are added: chunk, rank, request."""
        if world.rank == 0:
            import numpy

            from csdctl.worker.group import bf16

            self._numpy, self._bf16 = numpy, bf16
            self._received = [numpy.empty_like(local) for _ in range(1, world.size)]
            # The rank may still read the last sum in `total` when the first vector of the next one arrives.
            self._partial = numpy.empty_like(local)
            has_halves = any(num_halved for _, num_halved in self.sizes)
            self._sent = numpy.empty_like(local) if has_halves else total
            """The sum as it is on the wire."""

    @property
    def is_sending(self) -> bool:
        """Rank 0: whether the latest sum is still on its way to some rank."""
        return bool(self._sending)

    def find_missing(self) -> list[int]:
        """Rank 0: return the ranks whose vectors have not arrived completely."""
        return sorted({rank for _, rank, request in self._arriving if not request.Test()})

    def post_receives(self) -> None:
        """Rank 0: post receives for the other ranks' vectors of the next sum."""
        if self._world.rank or self._chunks:
            return
        self._chunks = next(self._next_chunks)
        self._arriving = [
            (chunk, rank, self._world.start_receive(buffer[chunk.wire], rank, _UP))
            for chunk in self._chunks
            for rank, buffer in enumerate(self._received, start=1)
        ]

    def progress(self) -> None:
        """Rank 0: add what has arrived, without waiting."""
        self._sending = [request for request in self._sending if not request.Test()]
        while self._arriving and is_complete(self._arriving[0][2]):
            self._add_next()

    def flush(self, on_wait: OnWait = ignore_wait) -> None:
        """Wait until the latest sum has left."""
        for request in self._sending:
            wait_sleeping(request, on_wait)
        self._sending = []

    def sum(self, on_wait: OnWait = ignore_wait, expected: ExpectedTails | None = None) -> None:
        """Sum the next vector of a step, in `local`, over all ranks into `total` on all ranks.

        Rank 0 raises PeerFaultError for a vector that does not end as `expected`, and keeps its sum.
        """
        if self._world.rank == 0:
            self.add(on_wait, expected, is_sending=True)
            return
        chunks = next(self._next_chunks)
        requests = [self._world.start_receive(self._total[chunk.wire], 0, _DOWN) for chunk in chunks]
        sending = [self._world.start_send(self._local[chunk.wire], 0, _UP) for chunk in chunks]
        for request in [*requests, *sending]:
            wait_sleeping(request, on_wait)

    def add(self, on_wait: OnWait, expected: ExpectedTails | None, *, is_sending: bool = False) -> None:
        """Rank 0: sum all vectors into `total`, as `sum` does; unless `is_sending`, `spread` is next."""
        self.post_receives()
        self.flush(on_wait)
        for chunk in self._chunks:
            while self._arriving and self._arriving[0][0] == chunk:
                wait_sleeping(self._arriving[0][2], on_wait, self.find_missing)
                self._add_next()
            own, total = self._local[chunk.elements], self._total[chunk.elements]
            if self._world.size == 1:
                total[:] = own
            else:
                self._numpy.add(self._partial[chunk.elements], own, out=total)
            if expected and chunk is self._chunks[-1]:
                expected.check([vector[: chunk.elements.stop] for vector in self._received])
            if is_sending:
                self._send(chunk)
        self._latest, self._chunks = self._chunks, []

    def spread(self) -> None:
        """Rank 0: send `total`, to which the sums of other groups have been added."""
        for chunk in self._latest:
            self._send(chunk)

    def find_not_finite(self) -> list[int]:
        """Rank 0: return the ranks whose latest vectors are not finite, or were followed by another one.

        After such a sum no rank has anything to send: a rank that does overwrites its vector.
        """
        # In this order: messages arrive while requests are tested, and one that did before is complete.
        is_finite = [
            all(bool(self._numpy.isfinite(self._read(vector, chunk)).all()) for chunk in self._latest)
            for vector in self._received
        ]
        waiting = Counter(rank for _, rank, request in self._arriving if not request.Test())
        return [
            rank
            for rank, is_right in enumerate(is_finite, start=1)
            if not is_right or waiting[rank] < len(self._chunks)
        ]

    def _add_next(self) -> None:
        chunk, rank, _ = self._arriving.pop(0)
        arrived, partial = self._read(self._received[rank - 1], chunk), self._partial[chunk.elements]
        if rank == 1:
            partial[:] = arrived
        else:
            self._numpy.add(partial, arrived, out=partial)

    def _read(self, vector: Any, chunk: Chunk) -> Any:
        """Return a chunk of a vector on the wire as float32."""
        if not chunk.is_halved:
            return vector[chunk.wire]
        return self._bf16.from_bf16(vector[chunk.wire].view(self._numpy.uint16))

    def _send(self, chunk: Chunk) -> None:
        """Send a chunk of `total` as it is on the wire; `total` is rounded as for the others."""
        if chunk.is_halved:
            halves = self._sent[chunk.wire].view(self._numpy.uint16)
            self._bf16.to_bf16(self._total[chunk.elements], halves)
            self._total[chunk.elements] = self._bf16.from_bf16(halves)
        elif self._sent is not self._total:
            self._sent[chunk.wire] = self._total[chunk.elements]
        content = self._sent[chunk.wire]
        self._sending += [self._world.start_send(content, rank, _DOWN) for rank in range(1, self._world.size)]


LONG_S = 2.0
"""A sum of so many seconds is timed once: opening the connections is a small part of it."""
NUM_ROUNDS = 2

COLLECTIVES: dict[str, type[Collective]] = {STAR: Star, ALLREDUCE: Collective}


def choose_collective(
    world: World,
    local: Any,
    total: Any,
    wanted: str = "",
    sizes: SumSizes = (),
    *,
    on_wait: OnWait = ignore_wait,
) -> tuple[Collective, str, float]:
    """Return the fastest collective, its name, and the seconds of a step's sums on the slowest rank.

    `wanted` names the collective to use instead. `sizes` as of `Collective`. Call on all ranks; raises
    PeerFaultError for a rank whose step has other sums than that of rank 0.
    """
    found = gather_values(world, sizes or ((len(local), 0),), SumSizes, on_wait)
    for rank, of_rank in enumerate(found):
        if of_rank != found[0]:
            own, expected = (", ".join(_describe(*size) for size in one[:10]) for one in (of_rank, found[0]))
            raise PeerFaultError(rank, f"sums {own} elements in a step, in this order; expected {expected}")
    measured: list[tuple[float, str, Collective]] = []
    for name in (wanted,) if wanted in COLLECTIVES else COLLECTIVES:
        collective = COLLECTIVES[name](world, local, total, sizes)
        # The first sum opens connections and does not count, if it is not long.
        slowest_s = find_slowest_s(world, _time_sum(world, collective, on_wait), on_wait)
        if slowest_s < LONG_S:
            own_s = min(_time_sum(world, collective, on_wait) for _ in range(NUM_ROUNDS))
            slowest_s = find_slowest_s(world, own_s, on_wait)
        measured.append((slowest_s, name, collective))
    seconds, name, collective = min(measured, key=lambda row: row[0])
    return collective, name, seconds


def _describe(size: int, num_halved: int) -> str:
    return f"{size} ({num_halved} as bfloat16)" if num_halved else str(size)


def find_slowest_s(world: World, own_s: float, on_wait: OnWait = ignore_wait) -> float:
    """Return the seconds of the slowest rank; raises PeerFaultError for what cannot be the time of a sum."""
    return float(max(gather_values(world, own_s, SumSeconds, on_wait)))


def _time_sum(world: World, collective: Collective, on_wait: OnWait) -> float:
    allgather(world, b"", 0, on_wait)
    started_s = time.perf_counter()
    for _ in collective.sizes:
        collective.sum(on_wait)
    seconds = time.perf_counter() - started_s
    collective.flush(on_wait)
    return seconds
