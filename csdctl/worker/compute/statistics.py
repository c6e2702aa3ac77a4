"""Model state that gradients do not train: moving statistics, other state of layers, random states."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.compute.keras_internals import (
    flatten_layers,
    global_seed_generator,
    non_trainable_state,
    seed_generators,
)

UNTRACKED = "a layer without its own seed generator"


def pooled_spread(mean_move: Any, variance_move: Any, rate: float) -> tuple[Any, Any]:
    """Return the changes of a batch norm's moving mean and variance, whose means over ranks can be pooled."""
    mean_move, variance_move = tf.cast(mean_move, tf.float32), tf.cast(variance_move, tf.float32)
    return mean_move, variance_move + mean_move * mean_move / rate


class Statistics:
    """The state of layers that a forward pass changes, flat: moving statistics, then any other state.

    State travels with the gradient, so that after every step each rank has the state of the pooled batch
    (docs/explanation/exact-gradients.md). For the moving statistics of batch norm:

        μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + (μ_k − μ)²) / N

    Ranks exchange Δ_k = (1 − m)(μ_k − moving mean), with m the layer's momentum: sums of small differences
    keep their precision, sums of squares would lose it. Of any other layer they exchange the change itself:
    the mean over all samples is exact for moving averages of batch means, and for state that does not depend
    on samples.
    """

    def __init__(self, model: Any) -> None:
        self.norms = [
            (layer.moving_mean, layer.moving_variance, 1.0 - float(layer.momentum))
            for layer in flatten_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and layer.momentum < 1
        ]
        self.variables = [variable for *pair, _ in self.norms for variable in pair]
        """Keras' variables."""
        self.add(changing_state(model))

    def add(self, variables: Iterable[Any]) -> None:
        """Add other state that a forward pass changes, if it can be averaged: numbers or booleans."""
        kinds = ("float", "int", "bool")
        self.variables += [
            variable for variable in variables if any(kind in variable.dtype for kind in kinds)
        ]

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each variable."""
        return [math.prod(variable.shape) for variable in self.variables]

    def read(self) -> list[Any]:
        """Return the state now, for `changes`."""
        return [tf.convert_to_tensor(variable.value) for variable in self.variables]

    def changes(self, before: Sequence[Any], weight: Any) -> list[Any]:
        """Return the changes since `before`, times `weight`, flat."""
        changes, old = [], iter(before)
        for mean, variance, rate in self.norms:
            moves = pooled_spread(mean - next(old), variance - next(old), rate)
            changes += [weight * move for move in moves]
        for variable, value in zip(self.variables[len(changes) :], old, strict=True):
            pair = variable.value, value
            new, old_value = (tf.cast(part, tf.int32) for part in pair) if variable.dtype == "bool" else pair
            changes.append(tf.reshape(tf.cast(new - old_value, tf.float32) * weight, [-1]))
        return changes

    def apply(self, changes: Any) -> None:
        """Update the state by the mean `changes` of all ranks, shape (Σ sizes,)."""
        parts = iter(tf.split(changes, self.sizes) if self.variables else ())
        for mean, variance, rate in self.norms:
            moved, spread = next(parts), next(parts)
            mean.assign(mean + tf.cast(moved, mean.dtype))
            spread = tf.cast(spread - moved * moved / rate, variance.dtype)
            variance.assign(tf.maximum(variance + spread, 0.0))
        for variable, part in zip(self.variables[2 * len(self.norms) :], parts, strict=True):
            change = tf.reshape(part, variable.shape)
            if "float" in variable.dtype:
                variable.assign(variable.value + tf.cast(change, variable.dtype))
            elif variable.dtype == "bool":
                variable.assign(tf.cast(variable.value, tf.float32) + change > 0.5)
            else:  # a counter, which all ranks advance alike
                variable.assign(variable.value + tf.cast(tf.round(change), variable.dtype))


def changing_state(model: Any) -> list[Any]:
    """Return the state of layers other than batch norm, as Keras' variables.

    Layers do not declare what changes it: only the constants of Keras' own preprocessing are left out. A
    SpectralNormalization writes the kernel that it wraps.
    """
    layers = keras.layers
    state: dict[int, Any] = {}
    for layer in flatten_layers(model):
        if not isinstance(layer, (layers.Normalization, layers.BatchNormalization)):
            state |= {id(variable): variable for variable in non_trainable_state(layer)}
        if isinstance(layer, layers.SpectralNormalization):
            state[id(layer.kernel)] = layer.kernel
    return list(state.values())


def find_generators(model: Any, values: Iterable[Any] = ()) -> list[tuple[str, Any]]:
    """Return the random states of a model's layers (dropout, augmentation), with the names of the layers.

    `values`: of which layers and seed generators belong to the step, too.
    """
    generators = seed_generators(model)
    for value in values:
        if isinstance(value, keras.layers.Layer):
            generators += seed_generators(value)
        elif isinstance(value, keras.random.SeedGenerator):
            generators.append((UNTRACKED, value))
    generators.append((UNTRACKED, global_seed_generator()))
    states = {id(generator): (name, generator.state) for name, generator in reversed(generators)}
    return list(states.values())[::-1]
