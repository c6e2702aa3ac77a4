"""Shape and type of one sample: a single array or, for a model with several inputs, a named array for each.

Several arrays are stored as one structured array with a field for each input, so that code that reads,
orders, slices or sends samples treats both cases alike.
"""

import json
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.datasets import DatasetInfo


def dtype_to_text(dtype: np.dtype[Any]) -> str:
    """Return a dtype as text, such as 'uint8'; a structured one as JSON: [[name, type, shape], …]."""
    if dtype.names is None:
        return str(dtype)
    fields = [(name, dtype[name]) for name in dtype.names]
    return json.dumps([[name, str(field.base), list(field.shape)] for name, field in fields])


def dtype_from_text(text: str) -> np.dtype[Any]:
    """Parse what `dtype_to_text` returned; raises ValueError for other text."""
    try:
        if not text.startswith("["):
            return np.dtype(text)
        return np.dtype([(name, base, tuple(shape)) for name, base, shape in json.loads(text)])
    except Exception as error:  # numpy evaluates some texts as Python, and passes on all of its errors
        raise ValueError(f"{text[:80]!r} is not a type of samples: {type(error).__name__}") from None


def random_samples(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return random samples, shape (n, …): integers in [0, 128) or floats in [0, 1)."""
    if dtype.names is None:
        if dtype.kind in "iu":
            return generator.integers(0, 128, shape).astype(dtype)
        return generator.random(shape).astype(dtype)
    samples = np.empty(shape, dtype)
    for name in dtype.names:
        samples[name] = random_samples(generator, (*shape, *dtype[name].shape), dtype[name].base)
    return samples


def random_batch(
    generator: np.random.Generator, element_spec: DatasetInfo, count: int
) -> tuple[Array, Array]:
    """Return random samples (n, …) and labels (n, …) shaped like a data set's: a step takes as long."""
    samples = random_samples(
        generator, (count, *element_spec.sample_shape), dtype_from_text(element_spec.dtype)
    )
    label_shape = (count, *element_spec.label_shape)
    if element_spec.max_label >= 0:
        return samples, generator.integers(0, element_spec.max_label + 1, label_shape, np.int32)
    return samples, generator.random(label_shape, np.float32)
