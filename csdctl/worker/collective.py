"""Collectives in which a waiting rank sleeps.

MPI's blocking calls poll without pause and burn the core that a slow node needs. Here only non-blocking
ones are used, tested with a sleep in between that grows from 0.1 to 2 ms (docs/decisions/0003).
"""

import time
from typing import Any, Protocol

import numpy as np

from csdctl.worker.data import Array

FIRST_SLEEP_S = 0.0001
LONGEST_SLEEP_S = 0.002
PIECE_SIZE = 1 << 18
"""Elements of a vector that travel as one message: 1 MiB of float32, below mpirun's eager limit."""

_UP, _DOWN = 1, 2


class Ranks(Protocol):
    """What the step needs of the other ranks."""

    rank: int
    size: int

    def sum(self, vector: Array) -> Array:
        """The sum of `vector` over all ranks, on all ranks, to the same bit; valid until the next call."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank, on all ranks."""


class MpiRanks:
    """The ranks of MPI.COMM_WORLD, in a star around rank 0, as PCIe is around the host.

    A sum is gathered, added in order of rank and sent back by rank 0: the same bits on every rank and in
    every run. In pieces, so that a piece travels while the next is added (docs/decisions/0006).
    """

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self.rank: int = self._world.rank
        self.size: int = self._world.size
        self._total = np.zeros(0, np.float32)
        self._received: list[Array] = []

    def sum(self, vector: Array) -> Array:
        """Sum of a contiguous vector, shape (n,); the result is in a buffer that is used again."""
        if self._total.shape != vector.shape or self._total.dtype != vector.dtype:
            self._total = np.empty_like(vector)
            senders = self.size - 1 if self.rank == 0 else 0
            self._received = [np.empty_like(vector) for _ in range(senders)]
        pieces = [slice(start, start + PIECE_SIZE) for start in range(0, len(vector), PIECE_SIZE)]
        if self.rank == 0:
            self._add_and_send(vector, pieces)
        else:
            requests = [self._world.Irecv(self._total[piece], 0, _DOWN) for piece in pieces]
            requests += [self._world.Isend(vector[piece], 0, _UP) for piece in pieces]
            self._wait_asleep(requests)
        return self._total

    def _add_and_send(self, vector: Array, pieces: list[slice]) -> None:
        others = range(1, self.size)
        arriving = [
            [
                self._world.Irecv(buffer[piece], rank, _UP)
                for rank, buffer in zip(others, self._received, strict=True)
            ]
            for piece in pieces
        ]
        sending = []
        for piece, requests in zip(pieces, arriving, strict=True):
            total = self._total[piece]
            total[...] = vector[piece]
            for request, buffer in zip(requests, self._received, strict=True):
                self._wait_asleep([request])
                np.add(total, buffer[piece], out=total)
            sending += [self._world.Isend(total, rank, _DOWN) for rank in others]
        self._wait_asleep(sending)

    def gather(self, value: Any) -> list[Any]:
        """Small Python values; every rank first waits asleep until all are there."""
        self._wait_asleep([self._world.Ibarrier()])
        return list(self._world.allgather(value))

    @property
    def library(self) -> str:
        """The MPI that is really in use, as it names itself."""
        return str(self._mpi.Get_library_version()).split(",")[0]

    def abort(self, exit_code: int) -> None:
        """End all ranks at once: the others would wait for ever for one that failed."""
        self._world.Abort(exit_code)

    def _wait_asleep(self, requests: list[Any]) -> None:
        """Return when all MPI requests are done, asleep in between."""
        pause = FIRST_SLEEP_S
        while not self._mpi.Request.Testall(requests):
            time.sleep(pause)
            pause = min(pause * 1.3, LONGEST_SLEEP_S)


def merge_batch_norm(model: Any, samples: int, ranks: Ranks, keras: Any) -> None:
    """Make the moving statistics of all ranks those of the pooled data, weighted by sample count.

    μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + μ_k²) / N − μ²: the spread between ranks is part of the variance.
    """
    layers = [layer for layer in _all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    if not layers:
        return
    pieces = []
    for layer in layers:
        mean = np.asarray(layer.moving_mean.value, np.float64)
        pieces += [mean, np.asarray(layer.moving_variance.value, np.float64) + mean**2]
    total = ranks.sum(np.concatenate([*(samples * piece for piece in pieces), [float(samples)]]))
    if total[-1] == 0:
        return
    merged = np.split(total[:-1] / total[-1], np.cumsum([len(piece) for piece in pieces])[:-1])
    for layer, mean, square in zip(layers, merged[::2], merged[1::2], strict=True):
        layer.moving_mean.assign(mean.astype(np.float32))
        layer.moving_variance.assign(np.maximum(square - mean**2, 0.0).astype(np.float32))


def _all_layers(model: Any) -> list[Any]:
    """Layers of `model`, and of models nested in it, in a fixed order."""
    found = []
    for layer in model.layers:
        found += _all_layers(layer) if hasattr(layer, "layers") else [layer]
    return found
