"""Prepared data and its shards, read a batch at a time.

A prepared data set is a directory with images.npy, labels.npy and dataset.json. The arrays are mapped,
never loaded: a rank's memory does not grow with its shard.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.schedule import Share, Span
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.run_spec import DatasetSlice, RunSpec

Array = np.ndarray[Any, Any]


def rows_of(part: DatasetSlice, num_rows: int) -> Array:
    """The row numbers, shape (n,), that `part` means in a data set of `num_rows` rows; sorted."""
    if part.stop is None:
        return np.arange(num_rows)
    permutation = np.random.default_rng(part.permutation_seed).permutation(num_rows)
    return np.sort(permutation[part.start : part.stop])


class PreparedSamples:
    """A prepared data set, or a part of one: rows of mapped images and labels."""

    def __init__(self, part: DatasetSlice) -> None:
        """Raises WorkerError when the files cannot be read."""
        self._images, self._labels = open_arrays(part.images, part.labels)
        self._rows = rows_of(part, len(self._images))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, places: Array) -> tuple[Array, Array]:
        """Images (n, …) and labels (n, …) at `places`, shape (n,), in the order of the file."""
        rows = self._rows[np.sort(places)]
        return self._images[rows], as_labels(self._labels[rows])

    def in_order(self, batch_size: int) -> Iterator[tuple[Array, Array]]:
        """All samples once, in their order: for evaluation."""
        for start in range(0, len(self), batch_size):
            yield self.read(np.arange(start, min(len(self), start + batch_size)))


class EpochReader:
    """What a rank reads in an epoch, and, on rank 0, what the others have borrowed.

    The order is a permutation of (seed, epoch, rank, kind), so that any step can be read again.
    """

    def __init__(self, spec: RunSpec, rank: int) -> None:
        """Raises WorkerError when data is missing or is not as much as the plan says."""
        me = spec.ranks[rank]
        self._spec = spec
        self._rank = rank
        self._private = PreparedSamples(me.private) if me.private else None
        self._public = PreparedSamples(me.public) if me.public else None
        self._all_public = PreparedSamples(spec.public) if spec.public and rank == 0 else None
        found = [len(part) if part else 0 for part in (self._private, self._public)]
        expected = [me.num_private - me.num_repeated, me.num_public]
        if found != expected:
            raise WorkerError(
                f"the shard has {found[0]} private and {found[1]} public samples, "
                f"the plan says {expected[0]} and {expected[1]}",
                remedy="run `csdctl tune` again",
            )
        self._epoch = 0
        self._orders: dict[tuple[int, int], Array] = {}
        self._parts: dict[int, Array] = {}

    def example(self) -> tuple[Array, Array]:
        """No images, shape (0, …), and no labels: for their shapes and types."""
        source = self._private or self._public
        if source is None:
            raise WorkerError("this rank has no data at all", remedy="run `csdctl tune` again")
        return source.read(np.zeros(0, np.int64))

    def first(self, count: int) -> tuple[Array, Array]:
        """The first `count` samples there are, fewer when there are fewer: to warm up."""
        source = self._private if self._private and len(self._private) else self._public
        if source is None or len(source) == 0:
            return self.example()
        return source.read(np.arange(min(count, len(source))))

    def begin(self, epoch: int) -> None:
        """From now on epoch `epoch` is read."""
        self._epoch = epoch
        self._orders = {}

    def read(self, share: Share, borrowed: bytes | bytearray | None = None) -> tuple[Array, Array]:
        """The samples of one step. `borrowed` is what rank 0 sent; rank 0 itself reads what it borrowed."""
        pieces = []
        if share.num_private and self._private:
            places = self._order(self._rank, _PRIVATE)[share.private_start : share.private_stop]
            pieces.append(self._private.read(places))
        if share.num_public and self._public:
            places = self._order(self._rank, _PUBLIC)[share.public_start : share.public_stop]
            pieces.append(self._public.read(places))
        if share.num_borrowed:
            lent = self.read_borrowed(share.borrowed) if borrowed is None else self._unpack(borrowed)
            pieces.append(lent)
        if not pieces:
            return self.example()
        if len(pieces) == 1:
            return pieces[0]
        images, labels = zip(*pieces, strict=True)
        return np.concatenate(images), np.concatenate(labels)

    def private_copies(self, share: Share) -> Array:
        """How often each private sample of a step is among them, shape (n,), in the order of `read`."""
        if not share.num_private:
            return np.zeros(0, np.int64)
        places = np.sort(self._order(self._rank, _PRIVATE)[share.private_start : share.private_stop])
        _, place, counts = np.unique(places, return_inverse=True, return_counts=True)
        copies: Array = counts[place]
        return copies

    def read_borrowed(self, pieces: Sequence[Span]) -> tuple[Array, Array]:
        """Rank 0: the samples of `pieces`, from the host's public data."""
        if self._all_public is None:
            raise WorkerError("samples were lent to a rank that cannot read them")
        places = [
            self._part(piece.rank)[self._order(piece.rank, _PUBLIC)[piece.start : piece.stop]]
            for piece in pieces
        ]
        return self._all_public.read(np.concatenate(places))

    def pack_borrowed(self, pieces: Sequence[Span]) -> bytes:
        """Rank 0: the samples of `pieces` as bytes, for the rank that borrowed them."""
        images, labels = self.read_borrowed(pieces)
        return images.tobytes() + labels.tobytes()

    def _unpack(self, packed: bytes | bytearray) -> tuple[Array, Array]:
        images, labels = self.example()
        sizes = [one.dtype.itemsize * int(np.prod(one.shape[1:])) for one in (images, labels)]
        count = len(packed) // sum(sizes)
        split = count * sizes[0]
        return (
            np.frombuffer(packed, images.dtype, offset=0, count=split // images.dtype.itemsize).reshape(
                count, *images.shape[1:]
            ),
            np.frombuffer(packed, labels.dtype, offset=split).reshape(count, *labels.shape[1:]),
        )

    def _order(self, rank: int, kind: int) -> Array:
        key = (rank, kind)
        if key not in self._orders:
            of_rank = self._spec.ranks[rank]
            generator = np.random.default_rng([self._spec.recipe.seed, self._epoch, rank, kind])
            if kind == _PUBLIC:
                self._orders[key] = generator.permutation(of_rank.num_public)
            else:
                different = of_rank.num_private - of_rank.num_repeated
                self._orders[key] = repeated_permutation(generator, different, of_rank.num_private)
        return self._orders[key]

    def _part(self, rank: int) -> Array:
        """The rows of all public samples that are rank `rank`'s, in the order of its own file."""
        if rank not in self._parts:
            of_rank = self._spec.ranks[rank]
            assert self._all_public is not None
            start = of_rank.public_start
            whole = DatasetSlice("", "", start, start + of_rank.num_public, self._spec.recipe.seed)
            self._parts[rank] = rows_of(whole, len(self._all_public))
        return self._parts[rank]


_PRIVATE, _PUBLIC = 0, 1


def repeated_permutation(generator: Any, num_different: int, count: int) -> Array:
    """`count` places, shape (count,): all of `num_different` in turn again and again, each time anew."""
    rounds = [generator.permutation(num_different) for _ in range(-(-count // max(1, num_different)))]
    return np.concatenate([np.zeros(0, np.int64), *rounds])[:count]


def as_labels(labels: Array) -> Array:
    """Labels in the one type that every rank uses: int32 for whole numbers, else float32."""
    return labels.astype(np.int32 if labels.dtype.kind in "iu" else np.float32)


def map_array(path: str | Path) -> Array:
    """Map one .npy file; raises OSError, or ValueError for what is no array of samples. Never unpickles."""
    array: Array = np.lib.format.open_memmap(Path(path).expanduser(), mode="r")
    if array.ndim == 0:
        raise ValueError("one number is no array of samples")
    return array


def open_arrays(images_path: str | Path, labels_path: str | Path) -> tuple[Array, Array]:
    """Map two .npy files; raises WorkerError, which names neither, when they cannot be read."""
    try:
        images, labels = map_array(images_path), map_array(labels_path)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"data set cannot be read: {type(error).__name__}", remedy="run `csdctl prepare` again"
        ) from None
    if len(images) != len(labels):
        raise WorkerError(f"data set is damaged: {len(images)} images but {len(labels)} labels")
    return images, labels
