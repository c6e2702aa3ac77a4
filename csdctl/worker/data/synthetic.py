"""Random samples in place of real data, for trials of the whole fleet."""

from collections.abc import Sequence

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.element_spec import random_batch
from csdctl.worker.data.schedule import Share, Span
from csdctl.worker.protocol.datasets import DatasetInfo


class SyntheticReader:
    """Stands in for `EpochReader`: returns random samples, the same ones for every request."""

    def __init__(self, element_spec: DatasetInfo, rank: int, num_indices: int | None = None) -> None:
        """`num_indices` as in `random_batch`."""
        self._element_spec, self._num_indices = element_spec, num_indices
        self._generator = np.random.default_rng(rank)
        self._batch: tuple[Array, Array] = random_batch(self._generator, element_spec, 0, num_indices)

    def empty_batch(self) -> tuple[Array, Array]:
        """Return zero samples, shape (0, …), and zero labels: for their shapes and types."""
        return self.first(0)

    def first(self, count: int) -> tuple[Array, Array]:
        """Return `count` samples and their labels."""
        if len(self._batch[0]) < count:
            self._batch = random_batch(self._generator, self._element_spec, count, self._num_indices)
        samples, labels = self._batch
        return samples[:count], labels[:count]

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: all epochs are the same."""

    def read(self, share: Share, reassigned: bytes | bytearray | None = None) -> tuple[Array, Array]:
        """Return as many samples as `share` has."""
        return self.first(share.num_samples)

    def private_copies(self, share: Share) -> Array:
        """Return 1 for each sample that stands for a private one, shape (n,)."""
        return np.ones(share.num_private, np.int64)

    def pack_reassigned(self, spans: Sequence[Span]) -> bytes:
        """Raise NotImplementedError: batch sizes do not change in a trial."""
        raise NotImplementedError
