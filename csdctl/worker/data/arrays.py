"""Arrays of samples and labels: their type, and the memory maps of the .npy files they are stored in."""

from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.process.errors import WorkerError

Array = np.ndarray[Any, Any]


def as_labels(labels: Array) -> Array:
    """Return labels in the type that every rank uses: int32 for integers, float32 otherwise."""
    return labels.astype(np.int32 if labels.dtype.kind in "iu" else np.float32)


def map_array(path: str | Path) -> Array:
    """Map one .npy file, without ever unpickling.

    Raises OSError if the file cannot be read, and ValueError if it is not an array of samples.
    """
    array: Array = np.lib.format.open_memmap(Path(path).expanduser(), mode="r")
    if array.ndim == 0:
        raise ValueError("expected an array of samples, found a single number")
    return array


def open_arrays(images_path: str | Path, labels_path: str | Path) -> tuple[Array, Array]:
    """Map the samples (n, …) and labels (n, …) of a prepared data set.

    Raises WorkerError, whose message names neither file, if they cannot be read or differ in length.
    """
    try:
        samples, labels = map_array(images_path), map_array(labels_path)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"the data set cannot be read: {type(error).__name__}", remedy="run `csdctl prepare` again"
        ) from None
    if len(samples) != len(labels):
        raise WorkerError(f"the data set is damaged: {len(samples)} samples but {len(labels)} labels")
    return samples, labels
