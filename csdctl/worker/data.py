"""Prepared data and its shards, read a batch at a time.

A prepared data set is a directory with images.npy, labels.npy and dataset.json. The arrays are mapped,
never loaded: a rank's memory does not grow with its shard.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.contract import ShardPart
from csdctl.worker.events import WorkerError

Array = np.ndarray[Any, Any]


def rows_of(part: ShardPart, num_rows: int) -> Array:
    """The row numbers, shape (n,), that `part` means in a data set of `num_rows` rows; sorted."""
    if part.stop is None:
        return np.arange(num_rows)
    permutation = np.random.default_rng(part.permutation_seed).permutation(num_rows)
    return np.sort(permutation[part.start : part.stop])


class Shard:
    """The samples of one epoch that a rank reads, from one or more prepared data sets."""

    def __init__(self, parts: Sequence[ShardPart]) -> None:
        self._sources: list[tuple[Array, Array]] = []
        rows = []
        for number, part in enumerate(parts):
            images, labels = open_arrays(part.images, part.labels)
            self._sources.append((images, labels))
            chosen = rows_of(part, len(images))
            rows.append(np.stack([np.full(len(chosen), number), chosen], axis=1))
        self._rows = np.concatenate(rows) if rows else np.zeros((0, 2), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def batches(self, batch_size: int, num_steps: int, seed: Sequence[int]) -> Iterator[tuple[Array, Array]]:
        """One epoch: exactly `num_steps` batches of at most `batch_size`, the last ones partial or empty.

        The order is a permutation of `seed` (the run's seed, the epoch, the rank).
        """
        order = self._rows[np.random.default_rng(list(seed)).permutation(len(self._rows))]
        for step in range(num_steps):
            yield self.read(order[step * batch_size : (step + 1) * batch_size])

    def read(self, rows: Array) -> tuple[Array, Array]:
        """Images (n, …) and labels (n, …) of `rows`, shape (n, 2): source and row."""
        pieces = []
        for number, (images, labels) in enumerate(self._sources):
            chosen = np.sort(rows[rows[:, 0] == number, 1])
            if len(chosen) or number == 0:
                pieces.append((images[chosen], as_labels(labels[chosen])))
        if len(pieces) == 1:
            return pieces[0]
        all_images, all_labels = zip(*pieces, strict=True)
        return np.concatenate(all_images), np.concatenate(all_labels)

    def in_order(self, batch_size: int) -> Iterator[tuple[Array, Array]]:
        """All samples once, in their order: for evaluation."""
        for start in range(0, len(self._rows), batch_size):
            yield self.read(self._rows[start : start + batch_size])


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
