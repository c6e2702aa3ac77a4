"""Random samples in place of data: what a trial of the whole fleet computes with."""

from collections.abc import Sequence

import numpy as np

from csdctl.worker.data.element_spec import random_batch
from csdctl.worker.data.prepared import Array
from csdctl.worker.data.schedule import Share, Span
from csdctl.worker.protocol.datasets import DatasetInfo


class SyntheticReader:
    """Reads as `data.EpochReader` does, and finds random samples; of one size always the same."""

    def __init__(self, form: DatasetInfo, rank: int) -> None:
        self._form = form
        self._generator = np.random.default_rng(rank)
        self._made: tuple[Array, Array] = random_batch(self._generator, form, 0)

    def example(self) -> tuple[Array, Array]:
        """No images, shape (0, …), and no labels: for their shapes and types."""
        return self.first(0)

    def first(self, count: int) -> tuple[Array, Array]:
        """`count` samples."""
        if len(self._made[0]) < count:
            self._made = random_batch(self._generator, self._form, count)
        images, labels = self._made
        return images[:count], labels[:count]

    def begin(self, epoch: int) -> None:
        """Nothing: every epoch is alike."""

    def read(self, share: Share, borrowed: bytes | bytearray | None = None) -> tuple[Array, Array]:
        """As many samples as `share` has."""
        return self.first(share.num_samples)

    def private_copies(self, share: Share) -> Array:
        """That many of them stand for private samples, each of them once."""
        return np.ones(share.num_private, np.int64)

    def pack_borrowed(self, pieces: Sequence[Span]) -> bytes:
        """Nothing is lent: batch sizes do not move in a trial."""
        raise NotImplementedError
