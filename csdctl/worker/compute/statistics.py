"""State of a model that is not trained by gradients: batch norm's moving statistics, and dropout's seeds.

Moving statistics travel with the gradient, so that every rank has those of the pooled batch after every
step (docs/explanation/exact-gradients.md):

    μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + (μ_k − μ)²) / N

What moves is Δ_k = (1 − m)(μ_k − moving mean) with m the layer's momentum: sums of small differences keep
their digits where sums of squares would lose them.
"""

import zlib
from typing import Any


class MovingStatistics:
    """The batch norm layers of a model, as one flat vector of differences."""

    def __init__(self, model: Any, tf: Any, keras: Any) -> None:
        self._tf = tf
        self._layers = [
            layer
            for layer in _all_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.momentum < 1
        ]
        self._variables = [
            (layer.moving_mean.value, layer.moving_variance.value, 1.0 - float(layer.momentum))
            for layer in self._layers
        ]
        self.size = sum(2 * int(mean.shape[0]) for mean, _, _ in self._variables)

    def read(self) -> list[Any]:
        """The statistics as they are, to be given to `take_changes`; inside a graph."""
        tf = self._tf
        return [(tf.identity(mean), tf.identity(variance)) for mean, variance, _ in self._variables]

    def take_changes(self, before: list[Any], count: Any) -> list[Any]:
        """What a forward pass changed, times `count`; puts the statistics back; inside a graph."""
        changes = []
        for (old_mean, old_variance), (mean, variance, rate) in zip(before, self._variables, strict=True):
            moved = mean - old_mean
            spread = (variance - old_variance) + moved * moved / rate
            changes += [count * moved, count * spread]
            mean.assign(old_mean)
            variance.assign(old_variance)
        return changes

    def apply_changes(self, changes: Any) -> None:
        """Let the statistics move by the mean `changes`, shape (size,), of all ranks; inside a graph."""
        tf = self._tf
        sizes = [int(mean.shape[0]) for mean, _, _ in self._variables for _ in range(2)]
        if not sizes:
            return
        pieces = tf.split(changes, sizes)
        for (mean, variance, rate), moved, spread in zip(
            self._variables, pieces[::2], pieces[1::2], strict=True
        ):
            mean.assign_add(moved)
            variance.assign(tf.maximum(variance + spread - moved * moved / rate, 0.0))


class Seeds:
    """The random states of a model's layers (dropout, augmentation), a function of seed, rank and step.

    A run that goes on from a step draws what it would have drawn.
    """

    def __init__(self, model: Any, seed: int, rank: int) -> None:
        self._states = []
        for number, generator in enumerate(_seed_generators(model)):
            key = zlib.crc32(f"{seed}/{rank}/{number}".encode())
            self._states.append((generator.state, key))

    @property
    def is_needed(self) -> bool:
        """Whether the model draws anything."""
        return bool(self._states)

    def set_step(self, step: int) -> None:
        """Before step `step` of the run, from 0."""
        for state, key in self._states:
            # A layer draws a few times a step; the counter of the next step is far from its own.
            state.assign([key, (step << 10) & 0xFFFFFFFF])


def _all_layers(model: Any) -> list[Any]:
    """Layers of `model`, and of models nested in it, each once, in a fixed order."""
    return [
        layer for layer in model._flatten_layers(include_self=False, recursive=True) if layer is not model
    ]


def _seed_generators(model: Any) -> list[Any]:
    return [generator for layer in _all_layers(model) for generator in getattr(layer, "_seed_generators", ())]
