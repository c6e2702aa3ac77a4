"""Collectives in which a waiting rank sleeps.

MPI's blocking calls poll without pause and burn the core that a slow node needs. These start the
non-blocking call and test it with a sleep that grows from 0.1 to 2 ms (docs/decisions/0003).
"""

import time
from typing import Any, Protocol

import numpy as np

from csdctl.worker.data import Array

FIRST_SLEEP_S = 0.0001
LONGEST_SLEEP_S = 0.002


class Ranks(Protocol):
    """What the step needs of the other ranks."""

    rank: int
    size: int

    def sum(self, vector: Array) -> Array:
        """The sum of `vector` over all ranks, on all ranks, to the same bit; valid until the next call."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank, on all ranks."""


class Alone:
    """One rank without MPI."""

    rank = 0
    size = 1

    def sum(self, vector: Array) -> Array:
        """`vector` itself."""
        return vector

    def gather(self, value: Any) -> list[Any]:
        """Just `value`."""
        return [value]


class MpiRanks:
    """The ranks of MPI.COMM_WORLD."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self.rank: int = self._world.rank
        self.size: int = self._world.size
        self._total = np.zeros(0, np.float32)

    def sum(self, vector: Array) -> Array:
        """One Iallreduce of a contiguous array; the result is written to a buffer that is used again."""
        if self._total.shape != vector.shape or self._total.dtype != vector.dtype:
            self._total = np.empty_like(vector)
        wait_asleep(self._world.Iallreduce(vector, self._total))
        return self._total

    def gather(self, value: Any) -> list[Any]:
        """Small Python values; every rank first waits asleep until all are there."""
        wait_asleep(self._world.Ibarrier())
        return list(self._world.allgather(value))

    def abort(self, exit_code: int) -> None:
        """End all ranks at once: the others would wait for ever for one that failed."""
        self._world.Abort(exit_code)


def wait_asleep(request: Any) -> None:
    """Return when the MPI `request` is done, asleep in between."""
    pause = FIRST_SLEEP_S
    while not request.Test():
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
