"""What a sample is made of: one array, or, for a model with several inputs, one array for each by name.

Several arrays are kept as one of records, a field for each input, so that everything that reads, orders,
cuts and sends samples need not know of them.
"""

import json
from typing import Any

import numpy as np

from csdctl.worker.data.prepared import Array
from csdctl.worker.protocol.datasets import DatasetInfo


def dtype_to_text(dtype: np.dtype[Any]) -> str:
    """The type of a sample's numbers, 'uint8'; for records JSON: [[name, type, shape], …]."""
    if dtype.names is None:
        return str(dtype)
    fields = [(name, dtype[name]) for name in dtype.names]
    return json.dumps([[name, str(field.base), list(field.shape)] for name, field in fields])


def dtype_from_text(text: str) -> np.dtype[Any]:
    """What `dtype_to_text` wrote."""
    if not text.startswith("["):
        return np.dtype(text)
    return np.dtype([(name, kind, tuple(shape)) for name, kind, shape in json.loads(text)])


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a sample is numbers alone."""
    parts = [dtype] if dtype.names is None else [dtype[name].base for name in dtype.names]
    return all(part.kind in "uif" for part in parts)


def random_samples(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Samples of shape (n, …): whole numbers 0…127, or numbers 0…1."""
    if dtype.names is None:
        if dtype.kind in "iu":
            return generator.integers(0, 128, shape).astype(dtype)
        return generator.random(shape).astype(dtype)
    made = np.empty(shape, dtype)
    for name in dtype.names:
        made[name] = random_samples(generator, (*shape, *dtype[name].shape), dtype[name].base)
    return made


def random_batch(generator: np.random.Generator, form: DatasetInfo, count: int) -> tuple[Array, Array]:
    """Random images (n, …) and labels (n, …) of the form of a data set: the time of a step is the same."""
    images = random_samples(generator, (count, *form.sample_shape), dtype_from_text(form.dtype))
    if form.max_label >= 0:
        return images, generator.integers(0, form.max_label + 1, (count, *form.label_shape), np.int32)
    return images, generator.random((count, *form.label_shape), np.float32)
