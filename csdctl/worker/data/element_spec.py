"""Shapes and types of samples without the samples, random batches of them, and the digest of a data set."""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array, open_arrays
from csdctl.worker.protocol.datasets import DatasetDigest, DatasetInfo

_MAX_INTEGER = (1 << 31) - 1


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


def random_samples(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    largest: Mapping[str, int] = MappingProxyType({}),
) -> Array:
    """Return random samples, shape (n, …): integers in [0, 128) or floats in [0, 1).

    `largest` has the largest integer of each field, '' for the only one: integers may be indices.
    """
    if dtype.names is None:
        return _random(generator, shape, dtype, largest.get("", 127))
    samples = np.empty(shape, dtype)
    for name in dtype.names:
        field = dtype[name]
        samples[name] = _random(generator, (*shape, *field.shape), field.base, largest.get(name, 127))
    return samples


def _random(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], largest: int
) -> Array:
    if dtype.kind not in "iu":
        return generator.random(shape).astype(dtype)
    return generator.integers(0, min(max(0, largest), _MAX_INTEGER), shape, endpoint=True).astype(dtype)


def random_batch(
    generator: np.random.Generator, element_spec: DatasetInfo, count: int, num_indices: int | None = None
) -> tuple[Array, Array]:
    """Return random samples (n, …) and labels (n, …) shaped like a data set's: a step takes as long.

    `num_indices`: of the model's smallest embedding. The columns of one input may be indices of several.
    """
    info = element_spec
    dtype = dtype_from_text(info.dtype)
    largest = dict(info.max_values)
    if num_indices is not None:
        largest = {
            name: min(num_indices - 1, largest.get(name, num_indices - 1)) for name in dtype.names or [""]
        }
    samples = random_samples(generator, (count, *info.sample_shape), dtype, largest)
    label_dtype = info.label_dtype or ("int32" if info.max_label >= 0 else "float32")
    labels = random_samples(
        generator,
        (count, *info.label_shape),
        dtype_from_text(label_dtype),
        {"": info.max_label, **info.max_labels},
    )
    return samples, labels


NUM_ROWS = 64
"""Samples that are hashed, evenly spaced; labels are all hashed."""


def compute_digest(directory: str) -> DatasetDigest:
    """Return the digest of the data set in `directory`; raises WorkerError if it cannot be read."""
    samples, labels = open_arrays(f"{directory}/images.npy", f"{directory}/labels.npy")
    digest = hashlib.sha256(
        repr(
            (samples.shape, dtype_to_text(samples.dtype), labels.shape, dtype_to_text(labels.dtype))
        ).encode()
    )
    digest.update(labels.tobytes())
    for row in np.linspace(0, len(samples) - 1, min(NUM_ROWS, len(samples)), dtype=np.int64):
        digest.update(samples[row].tobytes())
    return DatasetDigest(len(samples), digest.hexdigest())
