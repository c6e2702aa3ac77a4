"""What a linear map gets back of the samples that activations were computed from; numpy alone.

A ridge regression from activations to samples is fitted on some of the samples, and judged on others. That is
a lower limit of what can be reconstructed: a trained network gets back more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from csdctl.worker.data.arrays import Array

MAX_SAMPLES = 1500
"""What is fitted takes the memory of a square matrix of them."""
MIN_SAMPLES = 20
MAX_COLUMNS = 4096
"""Of activations and of samples; larger ones are reduced to as many."""
BLOCK_SAMPLES = 32
RIDGES = tuple(10.0**exponent for exponent in range(-8, 3))
"""Tried, relative to the mean variance of the activations."""
_TINY = 1e-12


@dataclass(frozen=True)
class Inversion:
    """How well samples were recovered that the map was not fitted on."""

    num_fitted: int
    num_held_out: int
    r2: float
    """Share of the variance around the mean sample that is recovered: 1 all, 0 what the mean sample has."""
    correlation: float
    """Of a recovered sample with the true one, over its values; the mean of all samples."""
    mean_correlation: float
    """The same of the mean sample: what is known without activations."""


def invert(samples: Array, activations: Array) -> Inversion | None:
    """Fit and judge the map; None for fewer than MIN_SAMPLES, samples that are all equal, or not finite.

    `samples`: shape (n, p), `activations`: (n, d), in random order.
    """
    count = len(samples)
    if count < MIN_SAMPLES:
        return None
    fitted, chosen = slice(0, count * 2 // 3), slice(count * 2 // 3, count * 5 // 6)
    held_out = slice(count * 5 // 6, count)
    x, a = samples.astype(np.float64), activations.astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(a).all()):
        return None
    mean = x[fitted].mean(axis=0)
    x -= mean
    a -= a[fitted].mean(axis=0)
    a /= math.sqrt(float(np.square(a[fitted]).sum(axis=1).mean())) or 1.0
    if float(np.square(x[held_out]).sum()) <= _TINY:
        return None
    # In as many dimensions as there are samples, whatever the activations have.
    values, vectors = np.linalg.eigh(a[fitted] @ a[fitted].T)
    values, towards = np.maximum(values, 0), vectors.T @ x[fitted]

    def recover(part: slice, ridge: float) -> Array:
        return np.asarray((a[part] @ a[fitted].T @ vectors / (values + ridge)) @ towards)

    ridge = min(RIDGES, key=lambda one: float(np.square(recover(chosen, one) - x[chosen]).sum()))
    found, true = recover(held_out, ridge), x[held_out]
    r2 = 1 - float(np.square(found - true).sum() / np.square(true).sum())
    return Inversion(
        len(x[fitted]),
        len(true),
        r2,
        _mean_correlation(found + mean, true + mean),
        _mean_correlation(np.broadcast_to(mean, true.shape), true + mean),
    )


def invert_prefix(
    read: Callable[[Array], Array], num_samples: int, compute: Callable[[Array], Array]
) -> Inversion | None:
    """Draw at most MAX_SAMPLES of `num_samples`, compute their activations, and invert these.

    `read` returns samples (n, …) by their indices, `compute` their activations (n, …). Samples with fields
    are not inverted: None.
    """
    generator = np.random.default_rng(0)
    indices = generator.permutation(num_samples)[:MAX_SAMPLES]
    samples, activations = [], []
    for start in range(0, len(indices), BLOCK_SAMPLES):
        block = read(indices[start : start + BLOCK_SAMPLES])
        if block.dtype.names:
            return None
        samples.append(reduce_samples(block))
        activations.append(reduce_columns(compute(block)))
    return invert(np.concatenate(samples), np.concatenate(activations)) if samples else None


def reduce_samples(samples: Array) -> Array:
    """Return samples as rows of at most MAX_COLUMNS: pictures (n, height, width, channels) made smaller."""
    values = samples.astype(np.float32)
    size = math.prod(values.shape[1:])
    if values.ndim == 4 and size > MAX_COLUMNS:
        height, width = values.shape[1:3]
        shortest = min(height, width)
        block = min(math.ceil(math.sqrt(size / MAX_COLUMNS)), shortest)
        rows, columns = height // block, width // block
        cropped = values[:, : rows * block, : columns * block]
        values = cropped.reshape(len(values), rows, block, columns, block, -1).mean(axis=(2, 4))
    flat = values.reshape(len(values), -1)
    return flat[:, :: math.ceil(flat.shape[1] / MAX_COLUMNS)]


def reduce_columns(activations: Array) -> Array:
    """Return activations as rows of at most MAX_COLUMNS, each a sum of some of them with random signs.

    Distances between rows stay about the same, in which alone a ridge regression sees them.
    """
    flat = activations.astype(np.float32).reshape(len(activations), -1)
    size = flat.shape[1]
    if size <= MAX_COLUMNS:
        return flat
    generator = np.random.default_rng(size)
    order, signs = generator.permutation(size), generator.choice([-1.0, 1.0], size).astype(np.float32)
    mixed = np.zeros((len(flat), MAX_COLUMNS * math.ceil(size / MAX_COLUMNS)), np.float32)
    mixed[:, :size] = flat[:, order] * signs
    return np.asarray(mixed.reshape(len(flat), -1, MAX_COLUMNS).sum(axis=1))


def _mean_correlation(found: Array, true: Array) -> float:
    """Return the mean correlation of rows with those of the same number; of constant rows, 0."""
    one, other = (rows - rows.mean(axis=1, keepdims=True) for rows in (found, true))
    scale = np.sqrt(np.square(one).sum(axis=1) * np.square(other).sum(axis=1))
    return float(((one * other).sum(axis=1) / np.maximum(scale, _TINY)).mean())
