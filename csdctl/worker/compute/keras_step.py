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
from csdctl.worker.compute.keras_internals import loss_of, noting_divisors
from csdctl.worker.compute.model import load
from csdctl.worker.compute.objective import as_tensors, inputs_of
from csdctl.worker.compute.own_step import OwnStepCompiler, repeatable_draws, replacing_apply, unpack
from csdctl.worker.compute.precision import widen
from csdctl.worker.compute.step_compiler import StepCompiler
from csdctl.worker.compute.trace import unflatten
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.layout import VectorLayout
from csdctl.worker.engine.step import EVALUATE, StepEngine
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec


class KerasStep:
    """Computes what a rank's engine computes, by the model's own train_step."""

    def __init__(self, model: Any, recipe: Recipe, engine: StepEngine, example: tuple[Array, Array]) -> None:
        """`engine`: of the same model, whose random states and rate are used. `example`: n may be 0."""
        self.engine, self._recipe = engine, recipe
        has_validation = EVALUATE in engine.info.functions
        self._compiler = make_compiler(
            model, recipe, example, has_noise=engine.has_noise, has_validation=has_validation
        )
        if len(self._compiler.variables) < len(engine.info.variables):
            trace(self._compiler)  # which finds variables that neither model nor optimizer knows
        self.model, self._variables = model, self._compiler.variables
        info = engine.info
        self.layout = VectorLayout(
            info.num_gradients,
            info.num_statistics,
            info.num_states,
            has_loss_count=info.has_loss_count,
            divides_gradients=info.divides_gradients,
        )
        """The layout of `vector`, in which what is a mean and what is summed are one, as in Keras."""
        self._unused: set[int] = set()

    def as_keras(self, vector: Array) -> Array:
        """Return a vector of the engine, or a sum of some, as `layout` says, float64."""
        vector = np.asarray(vector, np.float64)
        layout, whole, size = self.layout, self.engine.layout, self.layout.num_gradients
        if not whole.has_summed:
            return vector
        divisor, sums = vector[whole.divisor], vector[whole.sums.start :]
        gradients = vector[:size] + vector[size : 2 * size] * divisor
        result = np.concatenate(
            [gradients, vector[whole.statistics], sums[:1] + sums[1:2] * divisor, sums[2:]]
        )
        assert len(result) == layout.step_size
        return result

    def vector(
        self, values: Sequence[Array], images: Array, labels: Array, totals: Sequence[Array] = ()
    ) -> Array:
        """Return a rank's vector with the state `values`, shape (layout.step_size,), float64.

        `totals`: of an own train_step, the sums of the step over all ranks, which later sums depend on. The
        state behind the step is then that of the model.
        """
        size = max(1, self.engine.micro_batch_size or len(images))
        images, labels = self.engine.augment(images, labels)
        if isinstance(self._compiler, OwnStepCompiler):
            return self._take_own(self._compiler, values, images, labels, totals)
        assert isinstance(self._compiler, StepCompiler)
        vector = np.zeros(self.layout.step_size)
        for number, start in enumerate(range(0, len(images), size)):
            self._begin(values, number)
            batch = slice(start, start + size)
            vector += self._compute(self._compiler, images[batch], labels[batch])
        return vector

    def _begin(self, values: Sequence[Array], part: int = 0) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            assign(variable, value)
        self._compiler.seeds.set_step(*self.engine.position, part)
        for variable, factor in zip(self._compiler.rates, self.engine.info.rate_factors, strict=True):
            variable.assign(float(self.engine.rate) * factor)
        self.model.reset_metrics()

    def _compute(self, compiler: StepCompiler, images: Array, labels: Array) -> Array:
        """Return the vector of a micro-batch by Keras' train_step, whose gradients are not applied."""
        model, layout, objective, statistics = (
            self.model,
            self.layout,
            compiler.objective,
            compiler.statistics,
        )
        inputs = inputs_of(model, as_tensors(images), self._recipe.input_range)
        like = getattr(model, "output", None) if getattr(model, "outputs", None) else None
        like = model(inputs, training=False) if like is None else like
        targets, weights = objective.targets(as_tensors(labels), like, training=True)
        before, divisors, applied = statistics.read(), dict[Any, Any](), list[Any]()
        optimizer = model.optimizer
        with mock.patch.object(optimizer, "apply_gradients", applied.extend), noting_divisors(divisors):
            model.train_step((inputs, targets, weights))
        counted = [divisor for divisor, _ in divisors.values() if divisor is not None]
        is_counted = counted and not self.engine.has_noise and self.engine.info.has_loss_count
        count = float(counted[0]) if is_counted else float(len(images))
        gradients = [gradient for gradient, _ in applied]
        self._unused = {id(variable) for gradient, variable in applied if gradient is None}
        flat = [
            np.zeros(variable.shape) if one is None else np.asarray(tf.convert_to_tensor(one), np.float64)
            for one, variable in zip(gradients, model.trainable_variables, strict=True)
        ]
        vector = np.zeros(layout.step_size)
        vector[layout.gradients] = np.concatenate([one.ravel() for one in flat]) * count
        changes = [np.asarray(one).ravel() for one in statistics.changes(before, float(len(images)))]
        vector[layout.statistics] = np.concatenate([np.zeros(0), *changes])
        vector[layout.sums.start] = loss_of(model) * count
        vector[[layout.divisor, layout.count]] = count, len(images)
        return vector

    def apply(self, values: Sequence[Array], total: Array) -> list[Array]:
        """Return the state after Keras' optimizer has applied a summed vector of the engine to `values`."""
        compiler, layout = self._compiler, self.engine.layout
        assert isinstance(compiler, StepCompiler)
        self._begin(values)
        gradient = total[: layout.num_gradients] / total[layout.divisor]
        if layout.has_summed:
            gradient = gradient + total[layout.num_gradients : layout.gradients.stop]
        compiler.statistics.apply(tf.constant(total[layout.statistics] / total[layout.count], tf.float32))
        variables = self.model.trainable_variables
        pairs = zip(unflatten(tf.constant(gradient, tf.float32), variables), variables, strict=True)
        self.model.optimizer.apply_gradients([pair for pair in pairs if id(pair[1]) not in self._unused])
        return self.values

    @property
    def values(self) -> list[Array]:
        """The values of all variables of the state now."""
        return [np.asarray(one.value) for one in self._variables]

    def losses(
        self, values: Sequence[Array], batches: Sequence[Sequence[Array]]
    ) -> list[tuple[float, float]]:
        """Return Keras' loss of each batch in training: what is a mean, and what is summed."""
        compiler = self._compiler
        assert isinstance(compiler, StepCompiler)
        results = []
        for batch in batches:
            self._begin(values)
            found = compiler.objective.forward(*map(as_tensors, batch), training=True)
            results.append((float(found.mean), 0.0 if found.summed is None else float(found.summed)))
        return results

    def evaluate(self, values: Sequence[Array], images: Array, labels: Array) -> float:
        """Return the mean loss of a batch by Keras' test_step."""
        self._begin(values)
        assert isinstance(self._compiler, StepCompiler)
        inputs = inputs_of(self.model, as_tensors(images), self._recipe.input_range)
        predictions = self.model(inputs, training=False)
        targets, weights = self._compiler.objective.targets(as_tensors(labels), predictions, training=False)
        self.model.test_step((inputs, targets, weights))
        return loss_of(self.model)

    def _take_own(
        self,
        compiler: OwnStepCompiler,
        values: Sequence[Array],
        images: Array,
        labels: Array,
        totals: Sequence[Array],
    ) -> Array:
        engine, layout = self.engine, self.engine.layout
        vector = np.array(engine.local_sums(images, labels, totals), np.float64)
        if not len(images):
            return np.zeros(layout.step_size)
        self._begin(values)
        samples = unpack(as_tensors(images), as_tensors(labels), self._recipe.input_range)
        step = self.model.train_step
        with self._recording(totals) as gradients, repeatable_draws(tf.constant(engine.draw)):
            getattr(step, "python_function", step)(samples)
        weights = [1.0 if one.is_summed else float(len(images)) for one in engine.info.sums]
        parts = map(np.multiply, gradients, weights[: len(gradients)])
        vector[layout.gradients] = np.concatenate([np.zeros(0), *parts])
        return vector

    @contextmanager
    def _recording(self, totals: Sequence[Array]) -> Iterator[list[Array]]:
        """Let optimizers apply the gradients of `totals`. Yield those that they are given."""
        recorded: list[Array] = []
        engine = self.engine

        def record(_: Any, gradients: list[Any], __: Any) -> list[Any]:
            own = [np.asarray(tf.convert_to_tensor(one), np.float64) for one in gradients if one is not None]
            flat = np.concatenate([one.ravel() for one in own] or [np.zeros(0)])
            info, layout = engine.info.sums[len(recorded)], engine.layouts[len(recorded)]
            recorded.append(flat)
            mean = flat
            if len(totals):
                total = totals[len(recorded) - 1]
                mean = total[layout.gradients] / (1 if info.is_summed else total[layout.count])
            means = np.split(mean, np.cumsum([one.size for one in own]))
            shaped = iter(part.reshape(one.shape) for part, one in zip(means, own, strict=False))
            return [None if one is None else tf.cast(next(shaped), one.dtype) for one in gradients]

        with replacing_apply(record):
            yield recorded


def load_keras_step(
    spec: RunSpec, me: RankSpec, engine: StepEngine, example: tuple[Array, Array]
) -> KerasStep:
    """Return Keras' step of a run's model. `engine`: of the same model. Raises WorkerError without Keras."""
    load_backend(me.runtime)
    model = load(Path(spec.architecture), Path(spec.weights), spec.code)
    if not spec.split:
        widen(model)
    recipe = replace(spec.recipe, augment="") if spec.head else spec.recipe
    return KerasStep(model, recipe, engine, example)
