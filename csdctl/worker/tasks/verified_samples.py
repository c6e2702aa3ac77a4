"""The samples of a verification: random, drawn from (seed, rank) wherever they are needed.

No private sample is sent, and rank 0 can repeat the computation of all ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from csdctl.worker.compute.model import find_smallest_embedding
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.fields import SAMPLE_WEIGHT

MAX_SAMPLES = 16
"""Per rank: enough for unequal batches, and few enough for rank 0 to compute for all ranks."""
MAX_INTEGER = 128
"""Integers are drawn below this, below the size of every embedding, and not above those of rank 0's data."""
Limits = dict[str, int]
"""The largest integer of each field of the samples; '' for samples that are one array."""


def verified_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Return how many samples each rank takes: none where the plan has none, and not the same number on all.

    With equal numbers, a plain mean of the ranks' means would be right.
    """
    sizes = [min(size, MAX_SAMPLES) for size in batch_sizes]
    takers = [number for number, size in enumerate(sizes) if size]
    if len({sizes[number] for number in takers}) == 1:
        for number in takers[1::2]:
            sizes[number] = max(1, sizes[number] - max(1, sizes[number] // 4))
    return sizes


def find_limits(samples: Array) -> Limits:
    """Return the largest integers of `samples`: an input may be a class that a layer compares with."""
    fields = {name: samples[name] for name in samples.dtype.names} if samples.dtype.names else {"": samples}
    return {
        name: max(1, int(values.max()))
        for name, values in fields.items()
        if values.dtype.kind in "iu" and values.size
    }


def as_limits(value: Any) -> Limits:
    """Return what rank 0 sent, checked; raises TypeError."""
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and type(limit) is int and limit > 0 for name, limit in value.items()
    ):
        raise TypeError("expected the largest integer of each field")
    return value


def draw_samples(
    seed: int,
    rank: int,
    count: int,
    example: tuple[Array, Array],
    model: Any,
    limits: Mapping[str, int] | None = None,
) -> tuple[Array, Array]:
    """Return the first `count` random samples of rank `rank`, the same on every machine.

    Each sample has an amplitude of its own, and small labels are frequent: samples that are much alike have
    nearly the same gradient, so that one could be taken for another, and with balanced classes the gradients
    of an untrained model cancel.
    """
    limit = min(MAX_INTEGER, find_smallest_embedding(model) or MAX_INTEGER)
    sizes = [max(2, int(output.shape[-1] or 0)) for output in getattr(model, "outputs", None) or ()]
    samples, labels = (np.empty((count, *array.shape[1:]), array.dtype) for array in example)
    for number in range(count):
        generator = np.random.default_rng([seed, rank, number])
        _draw_sample(generator, samples[number : number + 1], limit, limits or {})
        _draw_labels(generator, labels[number : number + 1], sizes)
    return samples, labels


def _draw_sample(
    generator: np.random.Generator, sample: Array, limit: int, limits: Mapping[str, int]
) -> None:
    """Fill in `sample`: integers in [0, `limit`) or floats in [0, 1), field by field."""
    for name in sample.dtype.names or [""]:
        values = sample[name or ...]
        drawn = generator.random(values.shape) * (1 - generator.random())
        below = min(limit, limits.get(name, limit) + 1)
        values[...] = drawn * below if values.dtype.kind in "iu" else drawn


def _draw_labels(generator: np.random.Generator, labels: Array, sizes: Sequence[int]) -> None:
    """Fill in `labels`; structured ones have a field for each output, with its size, and one for weights."""
    for number, name in enumerate(labels.dtype.names or [...]):
        values = labels[name]
        if name == SAMPLE_WEIGHT:
            values[...] = 0.5 + generator.random(values.shape)
        elif values.dtype.kind in "iu":
            values[...] = np.minimum(generator.geometric(0.6, values.shape) - 1, _size_of(sizes, number) - 1)
        elif values.ndim == 2 and values.shape[1] > 1:  # one-hot
            values[...] = np.arange(values.shape[1]) == min(generator.geometric(0.6), values.shape[1]) - 1
        else:
            values[...] = generator.random(values.shape)


def _size_of(sizes: Sequence[int], number: int) -> int:
    """Return the size of an output; 2 for one that is only known by calling the model."""
    return sizes[number] if number < len(sizes) else 2
