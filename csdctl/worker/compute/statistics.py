"""Model state that gradients do not train: moving statistics of batch norm, and random seeds of dropout.

Moving statistics travel with the gradient, so that after every step each rank has those of the pooled batch
(docs/explanation/exact-gradients.md):

    μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + (μ_k − μ)²) / N

Ranks exchange Δ_k = (1 − m)(μ_k − moving mean), with m the layer's momentum: sums of small differences keep
their precision, sums of squares would lose it.
"""

import zlib
from typing import Any

import numpy as np

from csdctl.worker.compute.keras_internals import flatten_layers, seed_generators


class MovingStatistics:
    """Batch norm layers of a model, as one flat vector of differences."""

    def __init__(self, model: Any, tf: Any, keras: Any) -> None:
        self._tf = tf
        self._layers = [
            layer
            for layer in flatten_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.momentum < 1
        ]
        self._variables = [
            (layer.moving_mean.value, layer.moving_variance.value, 1.0 - float(layer.momentum))
            for layer in self._layers
        ]
        self.size = sum(2 * int(mean.shape[0]) for mean, _, _ in self._variables)

    def find_moved(self, changes: Any) -> list[str]:
        """Return the names of the layers whose statistics `changes`, shape (size,), would move.

        Only a layer that normalizes by its batch moves them, and not one that is called with training=False.
        """
        ends = np.cumsum([2 * int(mean.shape[0]) for mean, _, _ in self._variables])[:-1]
        parts = np.split(np.asarray(changes), ends) if self.size else []
        return [layer.name for layer, part in zip(self._layers, parts, strict=True) if part.any()]

    def read(self) -> list[Any]:
        """Return the current statistics, for `take_changes`; inside a graph."""
        tf = self._tf
        return [(tf.identity(mean), tf.identity(variance)) for mean, variance, _ in self._variables]

    def take_changes(self, before: list[Any], count: Any) -> list[Any]:
        """Return the changes by a forward pass, times `count`, and restore the statistics; inside a graph."""
        changes = []
        for (old_mean, old_variance), (mean, variance, rate) in zip(before, self._variables, strict=True):
            moved = mean - old_mean
            spread = (variance - old_variance) + moved * moved / rate
            changes += [count * moved, count * spread]
            mean.assign(old_mean)
            variance.assign(old_variance)
        return changes

    def apply_changes(self, changes: Any) -> None:
        """Update the statistics by the mean `changes` of all ranks, shape (size,); inside a graph."""
        tf = self._tf
        sizes = [int(mean.shape[0]) for mean, _, _ in self._variables for _ in range(2)]
        if not sizes:
            return
        parts = tf.split(changes, sizes)
        for (mean, variance, rate), moved, spread in zip(
            self._variables, parts[::2], parts[1::2], strict=True
        ):
            mean.assign_add(moved)
            variance.assign(tf.maximum(variance + spread - moved * moved / rate, 0.0))


class Seeds:
    """Random states of a model's layers (dropout, augmentation), as a function of seed, rank and step.

    A run that resumes at a step draws the same numbers as one that was never interrupted.
    """

    def __init__(self, model: Any, seed: int, rank: int) -> None:
        self._generators = seed_generators(model)
        self._seed = seed
        self._own_keys = self._keys(rank)

    def set_step(self, step: int, rank: int | None = None) -> None:
        """Set the random states for step `step` of the run, counted from 0; of another rank when given."""
        keys = self._own_keys if rank is None else self._keys(rank)
        for (_, generator), key in zip(self._generators, keys, strict=True):
            generator.state.assign([key, _first_counter(step)])

    def find_drawing(self, step: int) -> list[str]:
        """Return the names of the layers that have drawn random numbers since `set_step(step)`.

        A layer may have a seed generator and never use it, as an LSTM without dropout.
        """
        return [
            name
            for name, generator in self._generators
            if int(np.asarray(generator.state)[1]) != _first_counter(step)
        ]

    def _keys(self, rank: int) -> list[int]:
        return [
            zlib.crc32(f"{self._seed}/{rank}/{number}".encode()) for number in range(len(self._generators))
        ]


def _first_counter(step: int) -> int:
    # A layer draws a few times in a step; shifting keeps the counters of consecutive steps apart.
    return (step << 10) & 0xFFFFFFFF
