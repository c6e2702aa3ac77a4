"""A step that a user's own train_step takes: its optimizers get gradients that are summed over the ranks.

The author's train_step runs as it is written on every rank. Where it applies gradients (`apply` or
`apply_gradients` of an optimizer), the optimizer gets the mean over all samples (interception.py), so every
loss must be a mean over the samples of the batch. State that follows the batch is summed too
(`BatchStates` there).

A metric of the model starts anew in every step, and the states of all ranks are summed. Every other number
that train_step returns is averaged over the samples. Random numbers of keras.random and of tf.random follow
(seed, rank, step), as those of layers do.

When a sum fails, all variables return to the state before the step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.compute.interception import (
    BatchStates,
    Exchange,
    Interception,
    SumLayout,
    is_number,
    recording,
    repeatable_draws,
)
from csdctl.worker.compute.keras_internals import build_symbolically, find_globals
from csdctl.worker.compute.objective import (
    LOSS,
    MetricStates,
    as_tensors,
    noting_batches,
    scale,
    specs_of,
    symbolic,
)
from csdctl.worker.compute.statistics import Seeds, Snapshot
from csdctl.worker.compute.step import RankStep
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.layout import Sums
from csdctl.worker.process.errors import InputError, WorkerError, describe
from csdctl.worker.protocol.datasets import INPUT, OUTPUT, SAMPLE_WEIGHT, is_position
from csdctl.worker.protocol.recipe import Recipe


def has_own_step(model: Any) -> bool:
    """Return whether training calls code of the user's in place of Keras' train_step."""
    return getattr(model.train_step, "__func__", None) is not keras.Model.train_step


class CustomStep(RankStep):
    """Takes the steps of a model with a train_step of its own."""

    micro_batch_size: int | None = None
    """Not used: a step of several sums cannot be divided into micro-batches."""

    def __init__(
        self, model: Any, recipe: Recipe, example: tuple[Array, Array], *, rank: int = 0, weight: float = 1.0
    ) -> None:
        """Arguments as of `Step`; raises WorkerError, exit code 2, for a step that ranks cannot take."""
        super().__init__(model, recipe, rank)
        self.seeds = Seeds(model, recipe.seed, rank, find_globals(model))
        self.model = model
        self._input_range = recipe.input_range
        self._weight = weight
        self.signature = specs_of(example)
        self._example = example
        self._name = f"{getattr(model.train_step, '__name__', 'train_step')} of {type(model).__name__}"
        build_symbolically(model, self._unpack(*tf.nest.map_structure(symbolic, self.signature)))
        if not all(getattr(metric, "built", True) for metric in self._find_metrics()):
            # train_step creates state in its first call, such as of metrics of compile().
            self._trace_once(lambda x, y: (self._call(self.model.train_step, x, y), None)[1], self.signature)
        self._metrics = MetricStates(self._find_metrics())
        self._named = list(self._metrics.compute((0.0,) * self._metrics.size))
        self._evaluate: Any = None
        self._exchange: Exchange = _keep
        self._error: Exception | None = None
        self.log_names: list[str] = []
        """Names of the numbers that train_step returns."""
        self._trace()
        self._rates = [constant_rate(optimizer) for optimizer in self.optimizers]
        if len(self.optimizers) == 1 and self._rates[0] and recipe.learning_rate:
            self._rates[0] = recipe.learning_rate
        self._first_rate = recipe.learning_rate or next((rate for rate in self._rates if rate), 1.0)

    @property
    def state(self) -> list[Any]:
        """The variables that training changes: weights, then those of the optimizers, then all others."""
        found = [*self.model.weights, *(one for each in self.optimizers for one in each.variables)]
        known = {id(one.value) for one in found}
        return [*found, *(_Held(one) for one in self._written if id(one) not in known)]

    @property
    def applied(self) -> list[tuple[Any, list[Any]]]:
        """The optimizers to which train_step applies gradients, and the variables that they train."""
        return self._traced.applied

    @property
    def learning_rates(self) -> list[Any]:
        """The learning rates that every step sets: those that follow no schedule of their optimizer."""
        return [one.learning_rate for one, rate in zip(self.optimizers, self._rates, strict=True) if rate]

    @property
    def metric_names(self) -> list[str]:
        """Names of the results of `metrics`."""
        return list(dict.fromkeys([*self._named, *self.log_names]))

    @property
    def layout(self) -> SumLayout:  # type: ignore[override]
        """All sums joined, as `join` does."""
        num_gradients = sum(layout.num_gradients for layout in self.layouts)
        num_states = sum(layout.num_states for layout in self.layouts)
        return SumLayout("a step", num_gradients, num_states, self.layouts[-1].num_others)

    def set_step(self, step: int, learning_rate: float) -> None:
        """Set the learning rates and the random states of the run's step `step`, counted from 0.

        All rates are scaled as that of the recipe; schedules of an optimizer are not changed.
        """
        self.seeds.set_step(step)
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            if rate:
                scaled = rate * (learning_rate / self._first_rate)
                optimizer.learning_rate.value.assign(scaled, read_value=False)

    def run(self, images: Array, labels: Array, exchange: Exchange) -> Sums:
        """Take a step on this rank's batch; n may be 0.

        Raises what `exchange` raises, after all variables have returned to their values before the step.
        """
        return self._sums(self._run(images, labels, exchange)[self.layouts[-1].num_states :])

    def alone(self, images: Array, labels: Array, *, private_copies: Array | None = None) -> Sums:
        """Take a step of a rank without other ranks."""
        return self.run(images, labels, _keep)

    def take(self, images: Array, labels: Array, private_copies: Array | None = None) -> None:
        """Take a step without other ranks."""
        self.alone(images, labels)

    def local(
        self,
        images: Array,
        labels: Array,
        out: Array | None = None,
        *,
        private_copies: Array | None = None,
        totals: Sequence[Array] = (),
    ) -> Array:
        """Return this rank's part of all sums of a step, joined, and leave the model as it was.

        `totals`: the sums over all ranks of the same step; without them the rank is alone. There is neither
        noise nor a vector `out`, as in `Step.local`.
        """
        parts: list[Array] = []

        def exchange(number: int, part: Array) -> Array:
            parts.append(part.copy())
            return totals[number] if totals else part

        self._run(images, labels, exchange)
        self._restore()
        return self.join(parts)

    def join(self, parts: Sequence[Array]) -> Array:
        """Return the step's parts of all sums as one vector, as `layout` says."""
        pairs = list(zip(self.layouts, parts, strict=True))
        gradients = [part[layout.gradients] for layout, part in pairs]
        states = [part[layout.statistics] for layout, part in pairs]
        return np.concatenate([*gradients, *states, parts[-1][self.layouts[-1].num_states :]])

    def replay(self, images: Array, labels: Array, totals: Sequence[Array]) -> Array:
        """Return what `local` returns, but gradients as Keras computes them without the graph of this step.

        It is what the ranks are judged by: train_step is called eagerly, and the gradients that it applies
        are multiplied by n here. Leaves the state after the step.
        """
        random_states = Snapshot(self.seeds.states)
        vector = np.array(self.local(images, labels, totals=totals), np.float64)
        random_states.restore()  # layers draw the same numbers again
        if not len(images):
            return np.zeros(self.layout.step_size)
        samples = map(as_tensors, self.augment(images, labels))
        with recording(totals, self.layouts) as gradients, repeatable_draws(tf.constant(self._draw_seed())):
            self._call(self.model.train_step, *samples)
        weights = [self._weight if one.is_summed else self._weight * len(images) for one in self.layouts]
        vector[self.layout.gradients] = np.concatenate(list(map(np.multiply, gradients, weights)))
        return vector

    def rehearse(self, images: Array, labels: Array, private_copies: Array | None, *, is_alone: bool) -> None:
        """Reach full speed; the model stays as it was."""
        for _ in range(2):
            self.local(images, labels)

    def evaluate(self, images: Array, labels: Array) -> Sums:
        """Return the sums of one batch as the model's test_step computes them, without training."""
        self.trace_evaluation()
        return self._sums(np.asarray(self._evaluate(as_tensors(images), as_tensors(labels))))

    def trace_evaluation(self) -> None:
        """Trace test_step; raises WorkerError, exit code 2, if it fails."""
        if self._evaluate is not None:
            return
        traced = tf.function(self._evaluate_graph, autograph=False, input_signature=self.signature)
        try:
            self._evaluate = traced.get_concrete_function()
        except Exception as error:
            raise InputError(
                f"test_step of {type(self.model).__name__} fails: {describe(error)}",
                "define test_step, compile the model with a loss, or leave out data.validation",
            ) from None

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return the metrics of all samples of `sums` by name, but neither the loss nor unused ones."""
        found = self._results(sums.states, sums.count) if sums.states else {}
        return {name: value for name, value in found.items() if name != LOSS and not math.isnan(value)}

    def _results(self, states: Sequence[float], count: float) -> dict[str, float]:
        """Return the results of metrics that something was added to, then the logs."""
        size = self._metrics.size
        logs = zip(self.log_names, states[size:], strict=True)
        found = self._metrics.compute(states[:size], skip_unchanged=True)
        own = {name: value / count for name, value in logs if count}
        # A metric that nothing was added to has 0, as Keras' own for the loss where train_step computes it.
        return {name: value for name, value in own.items() if value or name not in self._named} | found

    def find_normalizing(self, changes: Array) -> list[str]:
        """Return the names of the layers that normalized by their batch, by its changes of statistics."""
        names, position = [], 0
        for name, size in self._states.parts:
            if name and np.asarray(changes[position : position + size]).any():
                names.append(name)
            position += size
        return list(dict.fromkeys(names))

    # --- the graph ---

    def _trace(self) -> None:
        extra = [tf.TensorSpec((), tf.float32), tf.TensorSpec((2,), tf.int32)]
        self._step = self._trace_once(self._step_graph, [*self.signature, *extra])
        self.layouts = self._traced.layouts
        self.has_draws = self._traced.has_draws
        if drawing := self._states.drawing:
            raise InputError(
                f"train_step draws random numbers by {', '.join(sorted(set(drawing)))}, which "
                "cannot be repeated when a step is done again",
                "draw with keras.random, or with tf.random.normal, uniform or categorical",
            )

    def _trace_once(self, code: Callable[..., Any], signature: Sequence[Any]) -> Any:
        traced = tf.function(code, autograph=False, input_signature=signature)
        try:
            return traced.get_concrete_function()
        except Exception as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, WorkerError):  # TensorFlow wraps what a tf.function raises
                cause = cause.__cause__ or cause.__context__
            if cause:
                raise cause from None
            raise InputError(
                f"{self._name} cannot be traced: {describe(error)}",
                "see docs/reference/models.md on models with their own train_step",
            ) from error

    def _step_graph(self, samples: Any, labels: Any, weight: Any, seed: Any) -> Any:
        # TensorFlow traces again if the first time has created variables.
        self._states = BatchStates(self._find_passing)
        self._traced = Interception(self._states, weight, self._weight, self._call_exchange)
        self._metrics.reset()
        with self._traced.active(seed):
            logs = self._call(self.model.train_step, samples, labels)
        if not self._traced.applied:
            raise InputError(
                f"{self._name} applies no gradients by a Keras optimizer",
                "call optimizer.apply(gradients, variables) in it",
            )
        count = weight / self._weight
        states = self._metrics.read((metric, count) for metric in self._traced.of_batches)
        found = self._own_logs(logs)
        self.log_names = list(found)
        numbers = [tf.reshape(tf.cast(value, tf.float32), [1]) * weight for value in found.values()]
        others = [*(state * self._weight for state in states), *numbers]
        total = self._traced.sum([], others, "states and logs")
        self._written, self._save, self._restore = self._states.hold()
        return total

    def _call_exchange(self, number: int, part: Array) -> Array:
        try:
            return self._exchange(number, part)
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else None
            raise

    def _find_passing(self) -> list[Any]:
        """Return the variables that every step sets anew: random states, and those of metrics."""
        metrics = [variable.value for metric in self._find_metrics() for variable in metric.variables]
        return [*(state.value for state in self.seeds.states), *metrics]

    def _find_metrics(self) -> list[Any]:
        """Return the metrics of the model, and global ones of its step."""
        kind = keras.metrics.Metric
        found = [one for one in (*self.model.metrics, *find_globals(self.model)) if isinstance(one, kind)]
        return list({id(one): one for one in found}.values())

    def _evaluate_graph(self, samples: Any, labels: Any) -> Any:
        self._metrics.reset()
        averaged: list[Any] = []
        with noting_batches(averaged):
            logs = self._call(self.model.test_step, samples, labels)
        count = tf.cast(tf.shape(tf.nest.flatten(samples)[0])[0], tf.float32)
        found = self._own_logs(logs)
        missing = tf.constant(math.nan)
        numbers = [tf.reshape(tf.cast(found.get(name, missing), tf.float32), [1]) for name in self.log_names]
        states = self._metrics.read((metric, count) for metric in averaged)
        return tf.concat([*states, *(one * count for one in numbers), [count]], axis=0) * self._weight

    def _call(self, code: Any, samples: Any, labels: Any) -> Any:
        """Call a step with one batch as Keras' fit does."""
        code = getattr(code, "python_function", code)  # of a method that is a tf.function itself
        return code(self._unpack(samples, labels))

    def _unpack(self, samples: Any, labels: Any) -> Any:
        """Return the batch as fit passes it: x, (x, y) or (x, y, sample_weight)."""
        parts = tf.nest.map_structure(self._scale, samples)
        if isinstance(parts, dict) and all(is_position(name, INPUT) for name in parts):
            parts = tuple(parts.values())
        weights = None
        if isinstance(labels, dict):
            labels = dict(labels)
            weights = labels.pop(SAMPLE_WEIGHT, None)
            if len(labels) == 1:
                labels = next(iter(labels.values()))
            elif all(is_position(name, OUTPUT) for name in labels):
                labels = tuple(labels.values())
        elif labels.shape[-1] == 0 and len(labels.shape) == 2:
            return parts
        return (parts, labels) if weights is None else (parts, labels, weights)

    def _scale(self, values: Any) -> Any:
        is_symbolic = type(values).__name__ == "KerasTensor"
        return values if is_symbolic else scale(values, self._input_range, None)

    def _own_logs(self, logs: Any) -> dict[str, Any]:
        """Return the numbers of what a step returned, results of the model's metrics included."""
        numbers = {name: tf.convert_to_tensor(value) for name, value in _flat_logs(logs)}
        return {name: value for name, value in numbers.items() if value.shape.rank == 0 and is_number(value)}

    # --- one process ---

    def _run(self, images: Array, labels: Array, exchange: Exchange) -> Array:
        """Take a step; return the last summed vector."""
        weight = np.float32(len(images) * self._weight)
        if len(images):
            images, labels = self.augment(images, labels)
        else:  # the step is taken all the same, for its sums
            images, labels = (np.zeros((1, *part.shape[1:]), part.dtype) for part in self._example)
        seed = self._draw_seed()
        self._exchange, self._error = exchange, None
        self._save()
        try:
            total: Array = np.asarray(
                self._step(*map(as_tensors, (images, labels)), *map(tf.convert_to_tensor, (weight, seed)))
            )
        except BaseException:
            self._restore()
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._exchange = _keep
        return total

    def _draw_seed(self) -> Array:
        """Return what the numbers of tf.random follow from in this step."""
        step, rank = self.seeds.position
        return np.array([step & 0x7FFFFFFF, self.seeds.key_of(rank) & 0x7FFFFFFF], np.int32)

    def _sums(self, tail: Array) -> Sums:
        *states, count = (float(value) for value in tail)
        found = (self._results(states, count) if count else {}) or {"": 0.0}
        # `loss`, else the first name with it, else the first of all.
        name = min(found, key=lambda name: (name != LOSS, LOSS not in name), default="")
        return Sums(found.get(name, math.nan) * count, tuple(states), count)


class _Held:
    """A tf.Variable with the interface of Keras' variables."""

    def __init__(self, variable: Any) -> None:
        self.value, self.assign = variable, variable.assign
        self.shape, self.dtype, self.path = variable.shape, variable.dtype.name, variable.name


def _flat_logs(logs: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of what a step returned, as fit does: results of a metric may be a dict."""
    for name, value in logs.items() if isinstance(logs, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _flat_logs(value)
        else:
            yield str(name), value


def _keep(number: int, part: Array) -> Array:
    """Return the sum of a rank without other ranks."""
    return part


def constant_rate(optimizer: Any) -> float:
    """Return the learning rate of an optimizer; 0 if it follows a schedule of its own."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    is_constant = hasattr(getattr(optimizer, "_learning_rate", None), "assign")
    return float(np.asarray(optimizer.learning_rate.value)) if is_constant else 0.0
