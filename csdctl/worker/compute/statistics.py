"""Model state that gradients do not train: moving statistics, other state of layers, random states."""

import math
import zlib
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.compute.keras_internals import (
    flatten_layers,
    global_seed_generator,
    own_state,
    seed_generators,
)
from csdctl.worker.engine.step import Slice

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


def pooled_spread(moved: Any, changed: Any, rate: float) -> tuple[Any, Any]:
    """Return the changes of a batch norm's moving mean and variance, whose means over ranks can be pooled."""
    moved, changed = tf.cast(moved, tf.float32), tf.cast(changed, tf.float32)
    return moved, changed + moved * moved / rate


class Statistics:
    """The state of layers that a forward pass changes, flat: moving statistics, then that of other layers.

    State travels with the gradient, so that after every step each rank has that of the pooled batch
    (docs/explanation/exact-gradients.md). For the moving statistics of batch norm:

        μ = Σ n_k μ_k / N,  σ² = Σ n_k (σ_k² + (μ_k − μ)²) / N

    Ranks exchange Δ_k = (1 − m)(μ_k − moving mean), with m the layer's momentum: sums of small differences
    keep their precision, sums of squares would lose it. Of any other layer they exchange the change itself:
    the mean over all samples is exact for moving averages of batch means, and for state that does not depend
    on samples.
    """

    def __init__(self, model: Any) -> None:
        self.norms = [
            (layer.name, layer.moving_mean, layer.moving_variance, 1.0 - float(layer.momentum))
            for layer in flatten_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and layer.momentum < 1
        ]
        self._others: list[Any] = []
        self.variables = [one for _, *pair, _ in self.norms for one in pair]
        """Keras' variables."""
        self.sizes = [math.prod(one.shape) for one in self.variables]
        self.add(changing_state(model))

    def add(self, variables: Iterable[Any]) -> None:
        """Add other state, of numbers or booleans, that a forward pass changes."""
        added = [one for one in variables if is_state(one)]
        self._others += added
        self.variables += added
        self.sizes += [math.prod(one.shape) for one in added]

    @property
    def normalizing(self) -> tuple[Slice, ...]:
        """The layers that normalize by their batch, and where their changes are."""
        ends = np.cumsum([0, *self.sizes])[: 2 * len(self.norms) + 1]
        pairs = zip(ends[:-1:2], ends[2::2], strict=True)
        return tuple(
            Slice(name, int(start), int(stop))
            for (name, *_), (start, stop) in zip(self.norms, pairs, strict=True)
        )

    def read(self) -> list[Any]:
        """Return the state now, for `changes`."""
        return [tf.convert_to_tensor(one.value) for one in self.variables]

    def changes(self, before: Sequence[Any], weight: Any) -> list[Any]:
        """Return the changes since `before`, times `weight`, flat."""
        changes, old = [], iter(before)
        for _, mean, variance, rate in self.norms:
            moved = pooled_spread(mean - next(old), variance - next(old), rate)
            changes += [weight * one for one in moved]
        for variable, value in zip(self._others, old, strict=True):
            pair = variable.value, value
            new, old_value = (tf.cast(one, tf.int32) for one in pair) if variable.dtype == "bool" else pair
            changes.append(tf.reshape(tf.cast(new - old_value, tf.float32) * weight, [-1]))
        return changes

    def apply(self, changes: Any) -> None:
        """Update the state by the mean `changes` of all ranks, shape (Σ sizes,)."""
        parts = iter(tf.split(changes, self.sizes) if self.variables else ())
        for _, mean, variance, rate in self.norms:
            moved, spread = next(parts), next(parts)
            mean.assign(mean + tf.cast(moved, mean.dtype))
            spread = tf.cast(spread - moved * moved / rate, variance.dtype)
            variance.assign(tf.maximum(variance + spread, 0.0))
        for variable, change in zip(self._others, parts, strict=True):
            shaped = tf.reshape(change, variable.shape)
            if "float" in variable.dtype:
                variable.assign(variable.value + tf.cast(shaped, variable.dtype))
            elif variable.dtype == "bool":
                variable.assign(tf.cast(variable.value, tf.float32) + shaped > 0.5)
            else:  # a counter, which all ranks advance alike
                variable.assign(variable.value + tf.cast(tf.round(shaped), variable.dtype))


def changing_state(model: Any) -> list[Any]:
    """Return the state of layers other than batch norm, as Keras' variables.

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
        found |= {id(one): one for one in state}
    return list(found.values())


def is_state(variable: Any) -> bool:
    """Return whether a variable has what can be averaged over samples: numbers or booleans."""
    return any(kind in variable.dtype for kind in ("float", "int", "bool"))


class Seeds:
    """Random states of a model's layers (dropout, augmentation), as a function of seed, rank and step.

    A run that resumes at a step draws the same numbers as one that was never interrupted.
    """

    def __init__(self, model: Any, seed: int, others: Iterable[Any] = ()) -> None:
        """`others`: values of which layers and seed generators belong to the step, too."""
        found = seed_generators(model)
        for one in others:
            if isinstance(one, keras.layers.Layer):
                found += seed_generators(one)
            elif isinstance(one, keras.random.SeedGenerator):
                found.append((UNTRACKED, one))
        found.append((UNTRACKED, global_seed_generator()))
        self._generators = list({id(pair[1]): pair for pair in reversed(found)}.values())[::-1]
        self._seed = seed

    def set_step(self, step: int, rank: int, part: int = 0) -> None:
        """Set the random states as `StepEngine.seeds` returns them, for a step of the run, from 0."""
        of_part = f"/{part}" if part else ""
        for number, (_, generator) in enumerate(self._generators):
            key = zlib.crc32(f"{self._seed}/{rank}/{number}{of_part}".encode())
            generator.state.assign(np.array([key, step << 10 & 0xFFFFFFFF], generator.state.dtype))

    def add(self, states: Iterable[Any]) -> None:
        """Add random states of generators that no layer has as an attribute."""
        self._generators += [(UNTRACKED, SimpleNamespace(state=one)) for one in states]

    @property
    def generators(self) -> list[tuple[str, Any]]:
        """The generators, with the names of their layers."""
        return self._generators

    @property
    def states(self) -> list[Any]:
        """The variables that hold the random states."""
        return [generator.state for _, generator in self._generators]
