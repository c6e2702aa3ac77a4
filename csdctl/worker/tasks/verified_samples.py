"""The samples of a verification: random, drawn from (seed, rank) wherever they are needed.

No private sample is sent, and rank 0 can repeat the computation of all ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from csdctl.worker.compute.keras_internals import find_smallest_embedding
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.datasets import SAMPLE_WEIGHT

MAX_SAMPLES = 16
"""Per rank: enough for unequal batches, and few enough for rank 0 to compute for all ranks."""
MAX_INTEGER = 128
"""Integers are drawn below this and below the size of every embedding, where nothing is known of the data."""
MAX_COLUMNS = 1024
"""Of a table, whose columns have ranges of their own."""
Ranges = dict[str, tuple[list[float], list[float]]]
"""By field of the samples, '' without fields: the smallest and largest value of each column, or of all."""


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


def find_ranges(samples: Array) -> Ranges:
    """Return the ranges of `samples`: an input may be a class that a layer compares with, or in metres."""
    fields = {name: samples[name] for name in samples.dtype.names} if samples.dtype.names else {"": samples}
    found = {}
    for name, values in fields.items():
        is_table = values.ndim == 2 and values.shape[1] <= MAX_COLUMNS
        columns = values.astype(np.float64).reshape(-1, values.shape[1] if is_table else 1)
        columns = columns[np.isfinite(columns).all(axis=1)]
        if columns.size:
            found[name] = columns.min(axis=0).tolist(), columns.max(axis=0).tolist()
    return found


def as_ranges(value: Any) -> Ranges:
    """Return what rank 0 sent, checked; raises TypeError."""
    if not isinstance(value, dict) or not all(_is_range(one) for one in value.values()):
        raise TypeError("expected the smallest and largest values of each field")
    return {name: (low, high) for name, (low, high) in value.items()}


def _is_range(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    is_numbers = all(
        isinstance(bounds, list) and all(type(one) is float and math.isfinite(one) for one in bounds)
        for bounds in value
    )
    return is_numbers and 0 < len(value[0]) == len(value[1]) <= MAX_COLUMNS


def draw_samples(
    seed: int,
    rank: int,
    count: int,
    example: tuple[Array, Array],
    model: Any,
    ranges: Ranges | None = None,
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
        _draw_sample(generator, samples[number : number + 1], limit, (ranges or {}).get)
        _draw_labels(generator, labels[number : number + 1], sizes)
    return samples, labels


def _draw_sample(
    generator: np.random.Generator, sample: Array, limit: int, find_range: Callable[[str], Any]
) -> None:
    """Fill in `sample`: in the range of the data; of fields without one, in [0, `limit`) or [0, 1).

    A model may have embeddings of different sizes, as of words and of their kinds: each is looked up with its
    own field or column, whose values the model takes.
    """
    for name in sample.dtype.names or [""]:
        values = sample[name or ...]
        drawn = generator.random(values.shape) * (1 - generator.random())
        is_integer, found = values.dtype.kind in "iu", find_range(name)
        if found is None:
            values[...] = drawn * limit if is_integer else drawn
            continue
        low, high = map(np.array, found)
        if is_integer:
            if values.ndim > 2:  # one range for columns of different meaning
                high = np.minimum(high, limit - 1) if limit < MAX_INTEGER else high
            drawn = np.floor(drawn * (high - low + 1))
        else:
            drawn *= high - low
        values[...] = low + drawn


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
