"""Compiles the step of a model: its functions as one graph, and what a rank must know to run them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import STATE, keras, tf
from csdctl.worker.compute.keras_internals import flatten_layers, own_state
from csdctl.worker.compute.objective import Objective
from csdctl.worker.compute.statistics import Seeds, pooled_spread
from csdctl.worker.compute.trace import GraphBuilder, assigning_in_scope, in_scope
from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.recipe import Recipe


def spec_of(variable: Any) -> Any:
    """Return shape and type of a Keras variable."""
    return tf.TensorSpec(variable.shape, variable.dtype)


class Statistics:
    """All state of layers that a forward pass changes; as statistics.LayerStates, of Keras' variables."""

    def __init__(self, model: Any) -> None:
        layers = keras.layers
        constant = (layers.Normalization, layers.BatchNormalization)
        self.norms = [
            (layer.name, layer.moving_mean, layer.moving_variance, 1.0 - float(layer.momentum))
            for layer in flatten_layers(model)
            if isinstance(layer, layers.BatchNormalization) and layer.trainable and layer.momentum < 1
        ]
        others: dict[int, Any] = {}
        for layer in flatten_layers(model):
            state = [] if isinstance(layer, constant) else own_state(layer)
            if isinstance(layer, layers.SpectralNormalization):
                state.append(layer.kernel)
            others |= {id(one): one for one in state if "float" in one.dtype or "int" in one.dtype}
        self.others = list(others.values())
        self.variables = [one for _, *pair, _ in self.norms for one in pair] + self.others
        self.sizes = [math.prod(one.shape) for one in self.variables]

    def changes(self, before: Sequence[Any], count: Any) -> list[Any]:
        """Return the changes since `before`, times `count`, flat; inside a scope."""
        changes, old = [], iter(before)
        for _, mean, variance, rate in self.norms:
            moved = pooled_spread(mean.value - next(old), variance.value - next(old), rate)
            changes += [count * one for one in moved]
        for variable, value in zip(self.others, old, strict=True):
            change = tf.cast(variable.value - value, tf.float32)
            changes.append(tf.reshape(change * count, [-1]))
        return changes

    def apply(self, changes: Any) -> None:
        """Update the state by the mean `changes` of all ranks; inside a scope."""
        if not self.variables:
            return
        parts = iter(tf.split(changes, self.sizes))
        for _, mean, variance, rate in self.norms:
            moved, spread = next(parts), next(parts)
            mean.assign(mean.value + tf.cast(moved, mean.dtype))
            spread = tf.cast(spread - moved * moved / rate, variance.dtype)
            variance.assign(tf.maximum(variance.value + spread, 0.0))
        for variable, change in zip(self.others, parts, strict=True):
            is_counter = "float" not in variable.dtype  # which all ranks advance alike
            shaped = tf.reshape(tf.round(change) if is_counter else change, variable.shape)
            variable.assign(variable.value + tf.cast(shaped, variable.dtype))


class StepCompiler:
    """The functions of a plain step; see step.py for the vector."""

    def __init__(self, model: Any, recipe: Recipe, example: tuple[Array, Array]) -> None:
        self.model = model
        self.objective = Objective(model, recipe, example)
        self.optimizer = model.optimizer
        self.optimizer.build(model.trainable_variables)
        self.statistics = Statistics(model)
        self.seeds = Seeds(model, recipe.seed, 0)
        rate = self.optimizer.learning_rate
        optimizer_state = [one for one in self.optimizer.variables if one is not rate]
        self.variables = [*model.weights, *optimizer_state]
        self.rate = rate
        self.seed_variables = [generator.state for _, generator in self.seeds._generators]
        self.has_summed = False
        self.unused: set[int] = set()

    def _scope(self, state: Sequence[Any], seeds: Any = None, rate: Any = None) -> Any:
        variables, values = [*self.variables], [*state]
        if seeds is not None:
            variables += self.seed_variables
            values += [tf.cast(one, v.dtype) for one, v in zip(tf.unstack(seeds, len(self.seed_variables)), self.seed_variables, strict=True)]
        if rate is not None:
            variables.append(self.rate)
            values.append(rate)
        return in_scope(variables, values)

    def _gradients(self, samples: Any, labels: Any) -> tuple[list[Any], list[Any], Any]:
        variables = self.model.trainable_variables
        values = [one.value for one in variables]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(values)
            batch = self.objective.forward(samples, labels, training=True)
            parts = [batch.mean] if batch.summed is None else [batch.mean, batch.summed]
        gradients = [tape.gradient(one, values) for one in parts]
        self.has_summed = batch.summed is not None
        found = zip(map(id, variables), *gradients, strict=True)
        self.unused = {key for key, *each in found if all(one is None for one in each)}
        means, *summed = (
            [
                tf.zeros(one.shape) if gradient is None else tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                for gradient, one in zip(part, variables, strict=True)
            ]
            for part in gradients
        )
        return means, summed[0] if summed else [], batch

    def local(self, state: Any, seeds: Any, samples: Any, labels: Any) -> Any:
        with self._scope(state, seeds):
            before = [one.value for one in self.statistics.variables]
            means, summed, batch = self._gradients(samples, labels)
            changes = self.statistics.changes(before, batch.samples)
            gradients = [*(mean * batch.loss_count for mean in means), *summed]
            flat = [tf.reshape(one, [-1]) for one in gradients]
            return tf.concat([*flat, *changes, *self._tail(batch)], axis=0)

    def _tail(self, batch: Any) -> list[Any]:
        tail = [tf.reshape(batch.mean * batch.loss_count, [1])]
        tail += batch.states
        return [*tail, tf.reshape(batch.samples, [1])]

    def apply(self, state: Any, rate: Any, total: Any) -> list[Any]:
        num = sum(math.prod(one.shape) for one in self.model.trainable_variables)
        with self._scope(state, rate=rate) as scope:
            gradient = tf.math.divide_no_nan(total[:num], total[-1])
            stats = slice(num, num + sum(self.statistics.sizes))
            self.statistics.apply(total[stats] / total[-1])
            self._optimize(gradient)
            return [scope.get_current_value(one) for one in self.variables]

    def _optimize(self, gradient: Any) -> None:
        variables = self.model.trainable_variables
        parts = tf.split(gradient, [math.prod(one.shape) for one in variables])
        pairs = [
            (tf.reshape(part, one.shape), one)
            for part, one in zip(parts, variables, strict=True)
            if id(one) not in self.unused
        ]
        with assigning_in_scope():
            self.optimizer.apply_gradients(pairs)

    def evaluate(self, state: Any, samples: Any, labels: Any) -> Any:
        with self._scope(state):
            batch = self.objective.forward(samples, labels, training=False)
            return tf.concat(self._tail(batch), axis=0)

    def compile(self) -> tuple[GraphBuilder, bytes]:
        builder = GraphBuilder()
        state = {f"state_{number}": spec_of(one) for number, one in enumerate(self.variables)}
        samples, labels = self.objective.signature
        batch = {"samples": samples, "labels": labels}
        n = len(state)
        seeds = {"seeds": tf.TensorSpec((len(self.seed_variables), 2), tf.int64)}
        builder.add("local", lambda *a: self.local(a[:n], *a[n:]), {**state, **seeds, **batch})
        size = builder.graph.get_tensor_by_name(builder.functions["local"][1][0]).shape[0]
        rate = {"rate": tf.TensorSpec((), tf.float32)}
        total = {"total": tf.TensorSpec((size,), tf.float32)}
        builder.add("apply", lambda *a: self.apply(a[:n], *a[n:]), {**state, **rate, **total})
        builder.add("evaluate", lambda *a: self.evaluate(a[:n], *a[n:]), {**state, **batch})
        return builder, builder.optimize()
