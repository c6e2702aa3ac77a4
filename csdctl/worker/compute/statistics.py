"""Model state that gradients do not train: moving statistics of batch norm, and random seeds of dropout.

Moving statistics travel with the gradient, so that after every step each rank has those of the pooled batch
(docs/explanation/exact-gradients.md):

    μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + (μ_k − μ)²) / N

Ranks exchange Δ_k = (1 − m)(μ_k − moving mean), with m the layer's momentum: sums of small differences keep
their precision, sums of squares would lose it.
"""

import zlib
from typing import Any

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
        self._states = []
        for number, generator in enumerate(seed_generators(model)):
            key = zlib.crc32(f"{seed}/{rank}/{number}".encode())
            self._states.append((generator.state, key))

    @property
    def is_needed(self) -> bool:
        """Whether the model has random layers."""
        return bool(self._states)

    def set_step(self, step: int) -> None:
        """Set the random states for step `step` of the run, counted from 0."""
        for state, key in self._states:
            # A layer draws a few times in a step; shifting keeps the counters of consecutive steps apart.
            state.assign([key, (step << 10) & 0xFFFFFFFF])
