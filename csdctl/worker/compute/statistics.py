"""Model state that gradients do not train: moving statistics, other state of layers, random seeds of dropout.

State travels with the gradient, so that after every step each rank has that of the pooled batch
(docs/explanation/exact-gradients.md). For the moving statistics of batch norm:

    μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + (μ_k − μ)²) / N

Ranks exchange Δ_k = (1 − m)(μ_k − moving mean), with m the layer's momentum: sums of small differences keep
their precision, sums of squares would lose it. Of any other layer they exchange the change itself: the mean
over all samples is exact for moving averages of batch means, and for state that does not depend on samples.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.compute.keras_internals import (
    flatten_layers,
    global_seed_generator,
    own_state,
    seed_generators,
)

UNTRACKED = "a layer without its own seed generator"


class Snapshot:
    """The values of Keras' variables at one moment."""

    def __init__(self, variables: Iterable[Any]) -> None:
        self._values = [(variable, np.asarray(variable.value).copy()) for variable in variables]

    def restore(self) -> None:
        """Set the variables to these values again."""
        for variable, value in self._values:
            variable.assign(value)

    def is_current(self) -> bool:
        """Return whether the variables still have these values."""
        return all(np.array_equal(value, np.asarray(variable.value)) for variable, value in self._values)


class LayerStates:
    """All state that a forward pass changes, flat: moving statistics, then the state of other layers."""

    def __init__(self, model: Any) -> None:
        layers = [
            layer
            for layer in flatten_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and layer.momentum < 1
        ]
        self._norms = [
            (layer.name, layer.moving_mean.value, layer.moving_variance.value, 1.0 - float(layer.momentum))
            for layer in layers
        ]
        self.variables = changing_state(model)
        """State of layers other than batch norm; restored after a forward pass."""
        self._all = [one for _, mean, variance, _ in self._norms for one in (mean, variance)]
        self._all += self.variables
        self._sizes = [int(tf.size(variable)) for variable in self._all]
        self.size = sum(self._sizes)

    def split(self, changes: Any) -> dict[int, Any]:
        """Return the parts of `changes`, shape (size,), by the id of the variable that they are of."""
        parts = np.split(np.asarray(changes), np.cumsum(self._sizes)[:-1]) if self._all else []
        return {id(variable): part for variable, part in zip(self._all, parts, strict=True)}

    def join(self, *found: dict[int, Any]) -> Any:
        """Return the sum of changes that other `LayerStates` of these layers have split, shape (size,)."""
        parts = [sum(parts[id(one)] for parts in found if id(one) in parts) for one in self._all]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def find_normalizing(self, changes: Any) -> list[str]:
        """Return the names of the layers that normalized by their batch, by its `changes`, shape (size,).

        Only such a layer moves its statistics, and not one that is called with training=False.
        """
        parts = self.split(changes)
        return [
            name
            for name, mean, variance, _ in self._norms
            if parts[id(mean)].any() or parts[id(variance)].any()
        ]

    def read(self) -> list[Any]:
        """Return the current state, for `take_changes`; inside a graph."""
        return [tf.identity(variable) for variable in self._all]

    def take_changes(self, before: list[Any], count: Any) -> list[Any]:
        """Return the changes by a forward pass, times `count`, and restore the state; inside a graph."""
        changes, old = [], iter(before)
        for _, mean, variance, rate in self._norms:
            moved, spread = pooled_spread(mean - next(old), variance - next(old), rate)
            changes += [count * moved, count * spread]
        for variable, value in zip(self.variables, old, strict=True):
            change = tf.cast(variable - value, tf.float32)
            changes.append(tf.reshape(change * count, [-1]))
        for value, variable in zip(before, self._all, strict=True):
            variable.assign(value)
        return changes

    def apply_changes(self, changes: Any) -> None:
        """Update the state by the mean `changes` of all ranks, shape (size,); inside a graph."""
        if not self._all:
            return
        parts = iter(tf.split(changes, self._sizes))
        for _, mean, variance, rate in self._norms:
            moved, spread = next(parts), next(parts)
            mean.assign_add(tf.cast(moved, mean.dtype))
            variance.assign(
                tf.maximum(variance + tf.cast(spread - moved * moved / rate, variance.dtype), 0.0)
            )
        for variable, change in zip(self.variables, parts, strict=True):
            is_counter = not variable.dtype.is_floating  # which all ranks advance alike
            shaped = tf.reshape(tf.round(change) if is_counter else change, variable.shape)
            variable.assign_add(tf.cast(shaped, variable.dtype))


def pooled_spread(moved: Any, changed: Any, rate: float) -> tuple[Any, Any]:
    """Return the changes of a batch norm's moving mean and variance, whose means over ranks can be pooled."""
    moved, changed = tf.cast(moved, tf.float32), tf.cast(changed, tf.float32)
    return moved, changed + moved * moved / rate


def changing_state(model: Any) -> list[Any]:
    """Return the state of layers other than batch norm, as tf.Variables.

    Layers do not declare what changes it: only the constants of Keras' own preprocessing are left out. A
    SpectralNormalization writes the kernel that it wraps.
    """
    layers = keras.layers
    constant = (layers.Normalization, layers.BatchNormalization)
    found: dict[int, Any] = {}
    for layer in flatten_layers(model):
        state = [] if isinstance(layer, constant) else own_state(layer)
        if isinstance(layer, layers.SpectralNormalization):
            state.append(layer.kernel)
        found |= {id(variable): variable.value for variable in state}
    return [value for value in found.values() if value.dtype.is_floating or value.dtype.is_integer]


class Seeds:
    """Random states of a model's layers (dropout, augmentation), as a function of seed, rank and step.

    A run that resumes at a step draws the same numbers as one that was never interrupted.
    """

    def __init__(self, model: Any, seed: int, rank: int, others: Iterable[Any] = ()) -> None:
        """`others`: values of which layers and seed generators belong to the step, too."""
        found = seed_generators(model)
        for one in others:
            if isinstance(one, keras.layers.Layer):
                found += seed_generators(one)
            elif isinstance(one, keras.random.SeedGenerator):
                found.append((UNTRACKED, one))
        found.append((UNTRACKED, global_seed_generator()))
        self._generators = list({id(pair[1]): pair for pair in reversed(found)}.values())[::-1]
        self._seed, self._rank = seed, rank
        self.position = (0, rank)
        """The step and the rank whose random states are set."""

    def set_step(self, step: int, rank: int | None = None) -> None:
        """Set the random states for step `step` of the run, counted from 0; of another rank when given."""
        self.position = (step, self._rank if rank is None else rank)
        for number, (_, generator) in enumerate(self._generators):
            key = zlib.crc32(f"{self._seed}/{self.position[1]}/{number}".encode())
            state = np.array([key, _first_counter(step)], generator.state.dtype)
            generator.state.value.assign(state, read_value=False)

    @property
    def generators(self) -> list[tuple[str, Any]]:
        """The generators, with the names of their layers."""
        return self._generators

    @property
    def states(self) -> list[Any]:
        """The variables that hold the random states."""
        return [generator.state for _, generator in self._generators]

    def key_of(self, rank: int) -> int:
        """Return a number for random operations without a state, of 32 bits."""
        return zlib.crc32(f"{self._seed}/{rank}".encode())

    def find_drawing(self, step: int) -> list[str]:
        """Return the names of the layers that have drawn random numbers since `set_step(step)`.

        A layer may have a seed generator and never use it, as an LSTM without dropout.
        """
        return [
            name
            for name, generator in self._generators
            if int(np.asarray(generator.state)[1]) != _first_counter(step)
        ]


def _first_counter(step: int) -> int:
    # A layer draws a few times in a step; shifting keeps the counters of consecutive steps apart.
    return (step << 10) & 0xFFFFFFFF
