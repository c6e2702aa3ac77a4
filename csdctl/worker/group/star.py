"""The star: rank 0 gathers, adds in order of rank, and sends the sum back (docs/decisions/0006).

It suits a host with its devices: all traffic passes the host anyway. Vectors are sent in chunks, so that a
chunk is sent while the next is added. Rank 0 adds vectors that arrive before its own vector is ready, and
continues as soon as it has the sum: it does not wait until the other ranks have received it. No rank has the
whole sum before rank 0 has compared the end of every vector with what it expects.
"""

from collections import Counter
from typing import Any

from csdctl.worker.group.mpi import Incoming, World
from csdctl.worker.group.tails import ExpectedTails
from csdctl.worker.group.waiting import OnWait, ignore_wait, wait_sleeping

CHUNK_SIZE = 1 << 18
"""Elements of a vector that are sent as one message: 1 MiB of float32, below mpirun's eager limit."""

_UP, _DOWN = 1, 2


class Star:
    """Implements `collective.Collective`."""

    def __init__(self, world: World, local: Any, total: Any) -> None:
        """`local` and `total`: contiguous float32 buffers of one size; numpy arrays on rank 0."""
        self._world = world
        self._local = local
        self._total = total
        self._chunks = [slice(start, start + CHUNK_SIZE) for start in range(0, len(local), CHUNK_SIZE)]
        self._has_posted = False
        self._sending: list[Any] = []
        """Rank 0: requests by which the latest sum leaves `total`."""
        self._arriving: list[tuple[slice, int, Incoming]] = []
        """Rank 0: posted receives, in the order in which they are added: chunk, rank, request."""
        if world.rank == 0:
            import numpy

            self._numpy = numpy
            self._received = [numpy.empty_like(local) for _ in range(1, world.size)]
            # The rank may still read the last sum in `total` when the first vector of the next one arrives.
            self._partial = numpy.empty_like(local)

    @property
    def is_sending(self) -> bool:
        """Rank 0: whether the latest sum is still on its way to some rank."""
        return bool(self._sending)

    def find_missing(self) -> list[int]:
        """Rank 0: return the ranks whose vectors have not arrived completely."""
        return sorted({rank for _, rank, request in self._arriving if not request.Test()})

    def post_receives(self) -> None:
        """Rank 0: post receives for the other ranks' vectors of the next sum."""
        if self._world.rank or self._has_posted:
            return
        self._has_posted = True
        self._arriving = [
            (chunk, rank, self._world.start_receive(buffer[chunk], rank, _UP))
            for chunk in self._chunks
            for rank, buffer in enumerate(self._received, start=1)
        ]

    def progress(self) -> None:
        """Rank 0: add what has arrived, without waiting."""
        self._sending = [request for request in self._sending if not request.Test()]
        while self._arriving and self._arriving[0][2].Test():
            self._add_next()

    def flush(self, on_wait: OnWait = ignore_wait) -> None:
        """Wait until the latest sum has left."""
        for request in self._sending:
            wait_sleeping(request, on_wait)
        self._sending = []

    def sum(self, on_wait: OnWait = ignore_wait, expected: ExpectedTails | None = None) -> None:
        """Sum `local` over all ranks into `total` on all ranks.

        Rank 0 raises PeerFaultError for a vector that does not end as `expected`, and keeps its sum.
        """
        if self._world.rank == 0:
            self._add_and_send(on_wait, expected)
            return
        requests = [self._world.start_receive(self._total[chunk], 0, _DOWN) for chunk in self._chunks]
        sending = [self._world.start_send(self._local[chunk], 0, _UP) for chunk in self._chunks]
        for request in [*requests, *sending]:
            wait_sleeping(request, on_wait)

    def find_not_finite(self) -> list[int]:
        """Rank 0: return the ranks whose latest vectors are not finite, or were followed by another one.

        After such a sum no rank has anything to send: a rank that does overwrites its vector.
        """
        # In this order: messages arrive while requests are tested, and one that did before is complete.
        is_finite = [bool(self._numpy.isfinite(vector).all()) for vector in self._received]
        waiting = Counter(rank for _, rank, request in self._arriving if not request.Test())
        num_chunks = len(self._chunks) if self._has_posted else 0
        return [
            rank
            for rank, is_right in enumerate(is_finite, start=1)
            if not is_right or waiting[rank] < num_chunks
        ]

    def _add_next(self) -> None:
        chunk, rank, _ = self._arriving.pop(0)
        arrived = self._received[rank - 1][chunk]
        if rank == 1:
            self._partial[chunk] = arrived
        else:
            self._numpy.add(self._partial[chunk], arrived, out=self._partial[chunk])

    def _add_and_send(self, on_wait: OnWait, expected: ExpectedTails | None) -> None:
        self.post_receives()
        self.flush(on_wait)
        for chunk in self._chunks:
            while self._arriving and self._arriving[0][0] == chunk:
                wait_sleeping(self._arriving[0][2], on_wait, self.find_missing)
                self._add_next()
            if self._world.size == 1:
                self._total[chunk] = self._local[chunk]
            else:
                self._numpy.add(self._partial[chunk], self._local[chunk], out=self._total[chunk])
            if expected and chunk is self._chunks[-1]:
                expected.check(self._received)
            self._sending += [
                self._world.start_send(self._total[chunk], rank, _DOWN) for rank in range(1, self._world.size)
            ]
        self._has_posted = False
