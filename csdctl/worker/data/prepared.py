"""Prepared data and its shards, read a batch at a time, and random samples in their place for trials.

A prepared data set is a directory with images.npy, labels.npy and dataset.json. The arrays are memory-mapped,
never loaded: the memory that a rank needs does not grow with its shard.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from csdctl.worker.data.arrays import Array, CheckedArray, as_labels, random_batch
from csdctl.worker.data.schedule import Share, Span
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.run_spec import DatasetSlice, RunSpec

# The last element of the seed of an order: it keeps the order of a rank's private samples apart from that of
# its public ones.
_PRIVATE, _PUBLIC = 0, 1


def rows_of(part: DatasetSlice, num_rows: int) -> Array:
    """Return the sorted row numbers, shape (n,), that `part` selects from a data set of `num_rows` rows."""
    if part.stop is None:
        return np.arange(num_rows)
    permutation = np.random.default_rng(part.permutation_seed).permutation(num_rows)
    return np.sort(permutation[part.start : part.stop])


class PreparedSamples:
    """A prepared data set, or a slice of one: rows of memory-mapped samples and labels."""

    def __init__(self, part: DatasetSlice) -> None:
        """Raise WorkerError if the files cannot be read, or are not those that were prepared."""
        parts = (part.images, part.images_sha256), (part.labels, part.labels_sha256)
        self._files = self._samples, self._labels = tuple(CheckedArray(*file) for file in parts)
        self._num_distinct, self._num_views = len(self._samples.array) // part.num_views, part.num_views
        self._rows = rows_of(part, self._num_distinct)
        self._first_row = 0

    def set_epoch(self, epoch: int) -> None:
        """Read the view of this epoch from now on."""
        self._first_row = epoch % self._num_views * self._num_distinct

    def check(self) -> None:
        """Raise WorkerError if the files have changed."""
        for file in self._files:
            file.check()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Array) -> tuple[Array, Array]:
        """Return samples (n, …) and labels (n, …) at `indices`, shape (n,), in the order of the file."""
        rows = self._rows[np.sort(indices)] + self._first_row
        return self._samples[rows], as_labels(self._labels[rows])

    def labels(self, indices: Array) -> Array:
        """Return the labels, shape (n, …), at `indices`, shape (n,), in the order of the file."""
        return as_labels(self._labels[self._rows[np.sort(indices)] + self._first_row])

    def span(self, start: int, most: int) -> tuple[Array, Array]:
        """Return up to `most` samples and labels from index `start` on, in the order of the file."""
        return self.read(np.arange(start, min(len(self), start + most)))


class EpochReader:
    """Reads the samples of one rank in an epoch and, on rank 0, those reassigned to other ranks.

    The order is a permutation seeded by (seed, epoch, rank, private or public), so that any step can be read
    again.
    """

    def __init__(self, spec: RunSpec, rank: int, convert: Callable[[Array], Array] | None = None) -> None:
        """`convert` makes features of the host's public samples. Raises WorkerError if data is missing."""
        self._spec, self._rank, me = spec, rank, spec.ranks[rank]
        parts = (me.private, me.public, spec.public if rank == 0 else None)
        self._files = [PreparedSamples(part) if part else None for part in parts]
        self._private, self._public, self._all_public = self._files
        self._convert = convert
        self._epoch = 0
        self._orders: dict[tuple[int, int], Array] = {}
        self._public_rows: dict[int, Array] = {}

    def first(self, count: int) -> tuple[Array, Array]:
        """Return the first `count` samples, or all if there are fewer: to warm up, and for their types."""
        source = self._private or self._public
        if source is None:
            raise WorkerError("this rank has no data", remedy="run `csdctl tune` again")
        return source.span(0, count)

    def set_epoch(self, epoch: int) -> None:
        """Read the samples of epoch `epoch` from now on. Raises WorkerError if a file has changed."""
        for part in filter(None, self._files):
            part.check()
            part.set_epoch(epoch)
        self._epoch = epoch
        self._orders = {}

    def read(self, share: Share, reassigned: bytes | bytearray | None = None) -> tuple[Array, Array]:
        """Return a step's samples, private ones first, `reassigned` ones last, which rank 0 reads itself."""
        batches = []
        if share.num_private and self._private:
            batches.append(self._private.read(self._private_indices(share)))
        if share.num_public and self._public:
            order = self._order(self._rank, _PUBLIC)
            batches.append(self._public.read(order[share.public_start : share.public_stop]))
        if share.num_reassigned:
            if reassigned is None:
                batches.append(self.read_reassigned(share.reassigned))
            else:
                batches.append(self._unpack(reassigned))
        if len(batches) < 2:
            return batches[0] if batches else self.first(0)
        samples, labels = zip(*batches, strict=True)
        return np.concatenate(samples), np.concatenate(labels)

    def private_copies(self, share: Share) -> Array:
        """Return how often the step has each of its private samples, shape (n,), in the order of `read`."""
        if not share.num_private:
            return np.zeros(0, np.int64)
        indices = np.sort(self._private_indices(share))
        _, inverse, counts = np.unique(indices, return_inverse=True, return_counts=True)
        copies: Array = counts[inverse]
        return copies

    def read_reassigned(self, spans: Sequence[Span]) -> tuple[Array, Array]:
        """Return the samples of `spans` from the host's public data. For rank 0 only."""
        assert self._all_public is not None
        indices = [
            self._rows_of_rank(span.rank)[self._order(span.rank, _PUBLIC)[span.start : span.stop]]
            for span in spans
        ]
        samples, labels = self._all_public.read(np.concatenate(indices))
        return self._convert(samples) if self._convert else samples, labels

    def pack_reassigned(self, spans: Sequence[Span]) -> bytes:
        """Return the samples of `spans` as bytes, for the rank they were reassigned to. For rank 0 only."""
        samples, labels = self.read_reassigned(spans)
        return samples.tobytes() + labels.tobytes()

    def _unpack(self, packed: bytes | bytearray) -> tuple[Array, Array]:
        samples, labels = self.first(0)
        count = len(packed) // sample_bytes(samples, labels)
        parts = np.split(np.frombuffer(packed, np.uint8), [count * sample_bytes(samples)])
        return (
            parts[0].view(samples.dtype).reshape(count, *samples.shape[1:]),
            parts[1].view(labels.dtype).reshape(count, *labels.shape[1:]),
        )

    def _private_indices(self, share: Share) -> Array:
        return self._order(self._rank, _PRIVATE)[share.private_start : share.private_stop]

    def _order(self, rank: int, visibility: int) -> Array:
        """Return the order in which rank `rank` reads its private or public samples in this epoch."""
        key = (rank, visibility)
        if key not in self._orders:
            spec = self._spec.ranks[rank]
            generator = np.random.default_rng([self._spec.recipe.seed, self._epoch, rank, visibility])
            count = spec.num_public if visibility == _PUBLIC else spec.num_private
            num_distinct = count if visibility == _PUBLIC else count - spec.num_repeated
            # Repeated samples: permutations of all of them, one after another.
            parts = [generator.permutation(num_distinct) for _ in range(-(-count // max(1, num_distinct)))]
            self._orders[key] = np.concatenate([np.zeros(0, np.int64), *parts])[:count]
        return self._orders[key]

    def _rows_of_rank(self, rank: int) -> Array:
        if rank not in self._public_rows:
            spec = self._spec.ranks[rank]
            assert self._all_public is not None
            start = spec.public_start
            part = DatasetSlice("", "", start, start + spec.num_public, self._spec.recipe.seed)
            self._public_rows[rank] = rows_of(part, len(self._all_public))
        return self._public_rows[rank]


def sample_bytes(*arrays: Array) -> int:
    """Return the bytes that one sample takes in these arrays, shape (n, …)."""
    return sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays)


class SyntheticReader:
    """Stands in for `EpochReader`: returns random samples, the same ones for every request."""

    def __init__(self, element_spec: DatasetInfo, rank: int) -> None:
        self._element_spec = element_spec
        self.num_indices: int | None = None
        """As in `random_batch`, of samples that are drawn from now on."""
        self._generator = np.random.default_rng(rank)
        self._batch: tuple[Array, Array] = random_batch(self._generator, element_spec, 0)

    def first(self, count: int) -> tuple[Array, Array]:
        """Return `count` samples and their labels."""
        if len(self._batch[0]) < count:
            self._batch = random_batch(self._generator, self._element_spec, count, self.num_indices)
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
        """Raise NotImplementedError: every rank of a trial makes its own samples."""
        raise NotImplementedError
