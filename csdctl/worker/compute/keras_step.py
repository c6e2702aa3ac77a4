"""A step of a model as Keras takes it, eagerly and without a graph: what `verify` compares ranks with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from csdctl.worker.compute.backend import load_backend, tf
from csdctl.worker.compute.compile import assign, make_compiler, trace
from csdctl.worker.compute.keras_internals import loss_of, noting_divisors, widen
from csdctl.worker.compute.model import load
from csdctl.worker.compute.objective import as_tensors, inputs_of
from csdctl.worker.compute.own_step import repeatable_draws, replacing_apply, unpack
from csdctl.worker.compute.trace import unflatten
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.step import EVALUATE, StepEngine
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec


class KerasStep:
    """Computes what a rank's engine computes, by the model's own train_step."""

    def __init__(self, model: Any, recipe: Recipe, engine: StepEngine, example: tuple[Array, Array]) -> None:
        """`engine`: of the same model, whose random states and rate are used. `example`: n may be 0."""
        self.engine, self.model = engine, model
        has_validation = EVALUATE in engine.info.functions
        self._compiler: Any = make_compiler(
            model, recipe, example, has_noise=engine.has_noise, has_validation=has_validation
        )
        if len(self._compiler.variables) < len(engine.info.variables):
            trace(self._compiler)  # which finds variables that neither model nor optimizer knows
        self._variables = self._compiler.variables
        self.layout = replace(engine.layout, has_summed=False)
        """The layout of `vector`, in which what is a mean and what is summed are one, as in Keras."""
        self._unused: set[int] = set()

    def as_keras(self, vector: Array) -> Array:
        """Return a vector of the engine, or a sum of some, as `layout` says, float64."""
        vector = np.asarray(vector, np.float64)
        layout, size = self.engine.layout, self.layout.gradients.stop
        if not layout.has_summed:
            return vector
        divisor, sums = vector[layout.divisor], vector[layout.sums.start :]
        gradients = vector[:size] + vector[size : 2 * size] * divisor
        loss = sums[:1] + sums[1:2] * divisor
        return np.concatenate([gradients, vector[layout.statistics], loss, sums[2:]])

    def vector(
        self, values: Sequence[Array], images: Array, labels: Array, totals: Sequence[Array] = ()
    ) -> Array:
        """Return a rank's vector with the state `values`, shape (layout.step_size,), float64.

        `totals`: of an own train_step, the sums of the step over all ranks, which later sums depend on. The
        state after the step is then the model's.
        """
        size = max(1, self.engine.micro_batch_size or len(images))
        images, labels = self.engine.augment(images, labels)
        if self.engine.info.sums:
            return self._take_own(values, images, labels, totals)
        vector = np.zeros(self.layout.step_size)
        for number, start in enumerate(range(0, len(images), size)):
            self._begin(values, number)
            vector += self._compute(images[start : start + size], labels[start : start + size])
        return vector

    def _begin(self, values: Sequence[Array], part: int = 0) -> None:
        compiler, engine = self._compiler, self.engine
        for variable, value in zip(self._variables, values, strict=True):
            assign(variable, value)
        for variable, seeds in zip(compiler.random_states, engine.seeds(part), strict=True):
            variable.assign(seeds.astype(variable.dtype))
        for variable, factor in zip(compiler.rates, engine.info.rate_factors, strict=True):
            variable.assign(float(engine.rate) * factor)
        self.model.reset_metrics()

    def _compute(self, images: Array, labels: Array) -> Array:
        model, layout, statistics = self.model, self.layout, self._compiler.statistics
        before, divisors, applied = statistics.read(), dict[Any, Any](), list[Any]()
        batch = self._unpack(images, labels)
        optimizer = model.optimizer
        with mock.patch.object(optimizer, "apply_gradients", applied.extend), noting_divisors(divisors):
            model.train_step(batch)
        counted = [divisor for divisor, *_ in divisors.values() if divisor is not None]
        is_counted = counted and not self.engine.has_noise and self.engine.layout.has_loss_count
        count = float(counted[0]) if is_counted else float(len(images))
        self._unused = {id(variable) for gradient, variable in applied if gradient is None}
        flat = [
            np.zeros(variable.shape).ravel() if gradient is None else _to_flat(gradient)
            for (gradient, _), variable in zip(applied, model.trainable_variables, strict=True)
        ]
        changes = [np.asarray(change).ravel() for change in statistics.changes(before, float(len(images)))]
        vector = np.zeros(layout.step_size)
        vector[layout.gradients] = np.concatenate(flat) * count
        vector[layout.statistics] = np.concatenate([np.zeros(0), *changes])
        vector[layout.sums.start] = loss_of(model) * count
        vector[[layout.divisor, layout.count]] = count, len(images)
        return vector

    def _unpack(self, images: Array, labels: Array) -> tuple[Any, Any, Any]:
        model = self.model
        inputs = inputs_of(model, as_tensors(images), self._compiler.recipe.input_range)
        predictions = getattr(model, "output", None) if getattr(model, "outputs", None) else None
        predictions = model(inputs, training=False) if predictions is None else predictions
        targets = self._compiler.objective.targets(as_tensors(labels), predictions, training=True)
        return inputs, *targets

    def apply(self, values: Sequence[Array], total: Array) -> list[Array]:
        """Return the state after Keras' optimizer has applied a summed vector of the engine to `values`."""
        layout, size = self.engine.layout, self.layout.gradients.stop
        self._begin(values)
        gradient = total[:size] / total[layout.divisor]
        if layout.has_summed:
            gradient = gradient + total[size : layout.gradients.stop]
        changes = total[layout.statistics] / total[layout.count]
        self._compiler.statistics.apply(tf.constant(changes, tf.float32))
        variables = self.model.trainable_variables
        pairs = zip(unflatten(tf.constant(gradient, tf.float32), variables), variables, strict=True)
        self.model.optimizer.apply_gradients([pair for pair in pairs if id(pair[1]) not in self._unused])
        return self.values

    @property
    def values(self) -> list[Array]:
        """The values of all variables of the state now."""
        return [np.asarray(variable.value) for variable in self._variables]

    def _take_own(
        self, values: Sequence[Array], images: Array, labels: Array, totals: Sequence[Array]
    ) -> Array:
        engine, layout = self.engine, self.engine.layout
        vector = np.array(engine.local_sums(images, labels, totals), np.float64)
        self._begin(values)
        samples = unpack(as_tensors(images), as_tensors(labels), self._compiler.recipe.input_range)
        step = self.model.train_step
        with self._recording(totals) as gradients, repeatable_draws(tf.constant(engine.draw)):
            getattr(step, "python_function", step)(samples)
        weights = [1.0 if part.is_summed else float(len(images)) for part in engine.info.sums]
        parts = map(np.multiply, gradients, weights[: len(gradients)])
        vector[layout.gradients] = np.concatenate([np.zeros(0), *parts])
        return vector

    @contextmanager
    def _recording(self, totals: Sequence[Array]) -> Iterator[list[Array]]:
        """Let optimizers apply the gradients of `totals`. Yield those that they are given."""
        recorded: list[Array] = []
        engine = self.engine

        def record(_: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
            flat = np.concatenate([np.zeros(0), *map(_to_flat, dense)])
            info, layout = engine.info.sums[len(recorded)], engine.layouts[len(recorded)]
            recorded.append(flat)
            mean = flat
            if len(totals):
                total = totals[len(recorded) - 1]
                mean = total[layout.gradients] / (1 if info.is_summed else total[layout.count])
            parts = np.split(mean, np.cumsum([np.size(gradient) for gradient in dense]))
            typed = iter(
                tf.cast(part.reshape(tuple(gradient.shape)), gradient.dtype)
                for part, gradient in zip(parts, dense, strict=False)
            )
            return [None if gradient is None else next(typed) for gradient in gradients]

        with replacing_apply(record):
            yield recorded


def _to_flat(gradient: Any) -> Array:
    return np.asarray(tf.convert_to_tensor(gradient), np.float64).ravel()


def load_keras_step(
    spec: RunSpec, me: RankSpec, engine: StepEngine, example: tuple[Array, Array]
) -> KerasStep:
    """Return Keras' step of the model of `spec` and `engine`. Raises WorkerError if Keras is missing."""
    load_backend(me.runtime)
    model = load(Path(spec.architecture), Path(spec.weights), spec.code)
    if not spec.split:
        widen(model)
    recipe = replace(spec.recipe, augment="") if spec.head else spec.recipe
    return KerasStep(model, recipe, engine, example)
