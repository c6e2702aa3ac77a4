"""A step that a user's own train_step takes: its optimizers get gradients that are summed over the ranks.

The author's train_step runs as it is written on every rank. Where it applies gradients (`apply` or
`apply_gradients` of an optimizer), each rank sends its gradients times its number of samples n, and the
optimizer gets Σ n g / Σ n. So every loss must be a mean over the samples of the batch. A step has one sum for
each time that it applies gradients, in the order of the trace, and a last one:

    [ n · gradients | n · changes of state | n | stop | seconds ]
    [ n · changes of state | states of metrics | n · logs | n | stop | seconds ]

State that a step writes is summed if it differs by rank (step_graph.py), with the next sum: of the statistics
of batch norm the pooled batch's are computed for each call, of all other state the mean of the changes. What
train_step assigns from weights alone, such as a moving average of them, every rank computes alike.

A metric of the model starts anew in every step, and the states of all ranks are summed. Every other number
that train_step returns is averaged over the samples. Random numbers of keras.random and of tf.random follow
(seed, rank, step), as those of layers do.

When a sum fails, all variables return to the state before the step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from csdctl.worker.compute.keras_internals import build_symbolically, optimizer_classes
from csdctl.worker.compute.objective import LOSS, MetricStates, as_tensors, scale, specs_of
from csdctl.worker.compute.statistics import Seeds, Snapshot, pooled_spread
from csdctl.worker.compute.step import RankStep, Step, Sums, size_of, unflatten
from csdctl.worker.compute.step_graph import StepGraph
from csdctl.worker.compute.user_code import Augmentation
from csdctl.worker.data.arrays import Array
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.datasets import INPUT, OUTPUT, SAMPLE_WEIGHT, is_position
from csdctl.worker.protocol.recipe import Noise, Recipe

Exchange = Callable[[int, Array], Array]
"""Sums a vector over the ranks, given the number of the sum within the step."""


def has_own_step(model: Any, keras: Any) -> bool:
    """Return whether training calls code of the user's in place of Keras' train_step."""
    return getattr(model.train_step, "__func__", None) is not keras.Model.train_step


@dataclass(frozen=True)
class SumLayout:
    """Where the parts of one summed vector of a step are: values, n, and what the training loop adds."""

    name: str
    """What is summed, for messages."""
    num_gradients: int
    num_states: int
    num_others: int = 0
    """States of metrics, and logs."""

    @property
    def num_values(self) -> int:
        """Elements before n."""
        return self.num_gradients + self.num_states + self.num_others

    @property
    def count(self) -> int:
        """The index of n, the number of samples."""
        return self.num_values

    @property
    def step_size(self) -> int:
        """Elements of the step's part."""
        return self.num_values + 1

    @property
    def step(self) -> slice:
        """The step's part."""
        return slice(0, self.step_size)

    @property
    def stop(self) -> int:
        """The index of the stop request."""
        return self.step_size

    @property
    def compute_s(self) -> slice:
        """Each rank's compute seconds, by rank of the run; above 0 in the last sum alone."""
        return slice(self.step_size + 1, None)


@dataclass(frozen=True)
class JoinedLayout:
    """Where the parts of all sums of a step are, joined into one vector: all gradients come first."""

    gradients: slice
    statistics: slice
    step_size: int

    @property
    def count(self) -> int:
        """The index of n."""
        return self.step_size - 1

    @property
    def step(self) -> slice:
        """The whole vector."""
        return slice(0, self.step_size)


@dataclass(frozen=True)
class _Norm:
    """A call of a batch norm in a step."""

    layer: Any
    moved: Any
    spread: Any


class CustomStep(RankStep):
    """Takes the steps of a model with a train_step of its own."""

    micro_batch_size: int | None = None
    """Not used: a step of several sums cannot be divided into micro-batches."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        example: tuple[Array, Array],
        tf: Any,
        keras: Any,
        *,
        rank: int = 0,
        weight: float = 1.0,
    ) -> None:
        """Arguments as of `Step`; raises WorkerError, exit code 2, for a step that ranks cannot take."""
        self.model, self._tf, self._keras = model, tf, keras
        self._input_range = recipe.input_range
        self._weight = weight
        self.augmentation = Augmentation(recipe.augment, recipe.seed) if recipe.augment else None
        self.seeds = Seeds(model, recipe.seed, rank)
        self.signature = specs_of(example, tf)
        self._example = example
        build_symbolically(model, self._unpack(*tf.nest.map_structure(_symbolic(keras), self.signature)))
        if not all(getattr(metric, "built", True) for metric in model.metrics):
            self._trace_once(self._call_train_step, self.signature)
        metrics = [metric for metric in model.metrics if isinstance(metric, keras.metrics.Metric)]
        self._metrics = MetricStates(metrics, (), tf)
        self._named = self._metrics.names
        self._evaluate: Any = None
        self._exchange: Exchange = _keep
        self._error: Exception | None = None
        self.has_draws = False
        """Whether train_step draws numbers by tf.random."""
        self.applied: list[tuple[Any, list[Any]]] = []
        """Optimizer and variables of each sum."""
        self.layouts: list[SumLayout] = []
        """The layouts of the sums of a step, in their order."""
        self._norms: list[_Norm] = []
        """The calls of batch norms since the last sum."""
        self._states: list[tuple[str, int]] = []
        """The parts of the changes of state, in order: the layer's name, '' for others, and the size."""
        self._bases: dict[int, Any] = {}
        """The values after the last sum of state that differs by rank, by the id of the variable."""
        self._held: dict[int, tuple[Any, Any]] = {}
        """Variables, and those that hold their values before the step, by id."""
        self._of_batches: list[Any] = []
        self.log_names: list[str] = []
        """Names of what train_step returns and no metric has."""
        self._trace()
        self.optimizers = list({id(one): one for one, _ in self.applied}.values())
        self._rates = [constant_rate(optimizer) for optimizer in self.optimizers]
        self._set_first_rate(recipe)
        self._first_rate = recipe.learning_rate or next((rate for rate in self._rates if rate), 1.0)

    @property
    def state(self) -> list[Any]:
        """The variables that training changes: weights, then those of the optimizers, then all others."""
        found = [*self.model.weights, *(one for each in self.optimizers for one in each.variables)]
        known = {id(one.value) for one in found}
        return [*found, *(_Held(one) for one in self._written if id(one) not in known)]

    @property
    def learning_rates(self) -> list[Any]:
        """The learning rates that every step sets: those that follow no schedule of their optimizer."""
        return [one.learning_rate for one, rate in zip(self.optimizers, self._rates, strict=True) if rate]

    @property
    def learning_rate(self) -> float:
        """The first optimizer's learning rate."""
        return float(self.optimizers[0].learning_rate)

    @property
    def metric_names(self) -> list[str]:
        """Names of the results of `metrics`."""
        return [*self._named, *self.log_names]

    @property
    def has_loss_scaling(self) -> bool:
        """Whether an optimizer skips gradients that are not finite, and scales the loss (mixed_float16)."""
        return any(hasattr(optimizer, "inner_optimizer") for optimizer in self.optimizers)

    @property
    def max_step_size(self) -> int:
        """Elements of the largest sum."""
        return max(layout.step_size for layout in self.layouts)

    @property
    def layout(self) -> Any:  # type: ignore[override]
        """All sums joined, as `join` does."""
        gradients = sum(layout.num_gradients for layout in self.layouts)
        end = gradients + sum(layout.num_states for layout in self.layouts)
        return JoinedLayout(slice(0, gradients), slice(gradients, end), end + self.layouts[-1].num_others + 1)

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
        return self.read_sums(self._run(images, labels, exchange))

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
        gradients, states = [], []
        for layout, part in zip(self.layouts, parts, strict=True):
            gradients.append(part[: layout.num_gradients])
            states.append(part[layout.num_gradients :][: layout.num_states])
        return np.concatenate([*gradients, *states, parts[-1][self.layouts[-1].num_states :]])

    def replay(self, images: Array, labels: Array, totals: Sequence[Array]) -> Array:
        """Return what `local` returns, but gradients as Keras computes them without the graph of this step.

        It is what the ranks are judged by: train_step is called eagerly, and the gradients that it applies
        are multiplied by n here. Leaves the state after the step.
        """
        tf, parts = self._tf, iter(totals)
        random_states = self.seeds.save()
        vector = np.array(self.local(images, labels, totals=totals), np.float64)
        random_states.restore()  # layers draw the same numbers again
        gradients: list[Array] = []
        is_applying = False

        def wrap(original: Any) -> Any:
            def apply(optimizer: Any, found: Any, trainable_variables: Any = None) -> Any:
                nonlocal is_applying
                if is_applying:
                    return original(optimizer, found, trainable_variables)
                own = [np.asarray(tf.convert_to_tensor(one), np.float64) for one in found if one is not None]
                gradients.append(np.concatenate([one.ravel() for one in own] or [np.zeros(0)]))
                total, layout = next(parts), self.layouts[len(gradients) - 1]
                ends = np.cumsum([one.size for one in own])
                means = np.split(total[: layout.num_gradients] / total[-1], ends)
                shaped = iter(part.reshape(one.shape) for part, one in zip(means, own, strict=False))
                types = iter(one.dtype for one in found if one is not None)
                summed = [None if one is None else tf.cast(next(shaped), next(types)) for one in found]
                is_applying = True
                try:
                    return original(optimizer, summed, trainable_variables)
                finally:
                    is_applying = False

            return apply

        if not len(images):
            return np.zeros(self.layout.step_size)
        samples = self._tensors(*self.augment(images, labels))
        with ExitStack() as stack:
            for kind in optimizer_classes(self._keras):
                stack.enter_context(_replacing(kind, "apply", wrap))
            stack.enter_context(repeatable_draws(tf, tf.constant(self._draw_seed())))
            self._call(self.model.train_step, *samples)
        vector[self.layout.gradients] = np.concatenate(gradients) * len(images) * self._weight
        return vector

    def rehearse_alone(self, images: Array, labels: Array) -> None:
        """Take a step of a rank without other ranks and undo it."""
        self.local(images, labels)

    def rehearse(self, images: Array, labels: Array, private_copies: Array | None, *, is_alone: bool) -> None:
        """Reach full speed; the model stays as it was."""
        for _ in range(2):
            self.local(images, labels)

    def evaluate(self, images: Array, labels: Array) -> Sums:
        """Return the sums of one batch as the model's test_step computes them, without training."""
        if self._evaluate is None:
            graph = self._tf.function(self._evaluate_graph, autograph=False, input_signature=self.signature)
            self._evaluate = graph
        try:
            return self._sums(np.asarray(self._evaluate(*self._tensors(images, labels))))
        except Exception as error:
            raise WorkerError(
                f"test_step of {type(self.model).__name__} fails: {describe(error)}",
                remedy="define test_step, or leave out data.validation",
                exit_code=2,
            ) from None

    def read_sums(self, total: Array) -> Sums:
        """Return loss, states of metrics and count of the last summed vector of a step."""
        return self._sums(total[self.layouts[-1].num_states :])

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return the metrics of all samples of `sums` by name, without those that nothing was added to."""
        found = self._results(sums.states, sums.count) if sums.states else {}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _results(self, states: Sequence[float], count: float) -> dict[str, float]:
        """Return the results of metrics that something was added to, then the logs."""
        size = self._metrics.size
        logs = zip(self.log_names, states[size:], strict=True)
        found = self._metrics.compute(states[:size], skip_unchanged=True)
        return found | {name: value / count for name, value in logs if count}

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Hold the weights of the trained model: their moving average, where an optimizer keeps one."""
        averaging = [
            (one, variables)
            for one, variables in self.applied
            if getattr(getattr(one, "inner_optimizer", one), "use_ema", False)
        ]
        before = Snapshot(variable for _, variables in averaging for variable in variables)
        for optimizer, variables in averaging:
            optimizer.finalize_variable_values(variables)
        try:
            yield
        finally:
            before.restore()

    def find_normalizing(self, changes: Array) -> list[str]:
        """Return the names of the layers that normalized by their batch, by its changes of statistics."""
        names, position = [], 0
        for name, size in self._states:
            if name and np.asarray(changes[position : position + size]).any():
                names.append(name)
            position += size
        return list(dict.fromkeys(names))

    # --- the graph ---

    def _trace(self) -> None:
        tf = self._tf
        extra = [tf.TensorSpec((), tf.float32), tf.TensorSpec((2,), tf.int32)]
        self._step = self._trace_once(self._step_graph, [*self.signature, *extra])
        if self.drawing:
            raise WorkerError(
                f"train_step draws random numbers by {', '.join(sorted(set(self.drawing)))}, which "
                "cannot be repeated when a step is done again",
                remedy="draw with keras.random, or with tf.random.normal, uniform or categorical",
                exit_code=2,
            )

    def _trace_once(self, code: Callable[..., Any], signature: Sequence[Any]) -> Any:
        traced = self._tf.function(code, autograph=False, input_signature=signature)
        try:
            return traced.get_concrete_function()
        except WorkerError:
            raise
        except Exception as error:
            raise WorkerError(
                f"train_step of {type(self.model).__name__} cannot be traced: {describe(error)}",
                remedy="see docs/reference/models.md on models with their own train_step",
                exit_code=2,
            ) from error

    def _call_train_step(self, samples: Any, labels: Any) -> None:
        """Create the state that train_step creates in its first call, such as of metrics of compile()."""
        self._call(self.model.train_step, samples, labels)

    def _step_graph(self, samples: Any, labels: Any, weight: Any, seed: Any) -> Any:
        tf = self._tf
        self._main = tf.compat.v1.get_default_graph()
        recorded: tuple[list[Any], ...] = (self.applied, self.layouts, self._norms, self._states)
        for one in (*recorded, self._of_batches):
            one.clear()  # TensorFlow traces again if the first time has created variables
        self._bases = {}
        self._metrics.reset()
        with self._intercepting(weight, seed):
            logs = self._call(self.model.train_step, samples, labels)
        if not self.applied:
            raise WorkerError(
                f"train_step of {type(self.model).__name__} applies no gradients by a Keras optimizer",
                remedy="call optimizer.apply(gradients, variables) in it",
                exit_code=2,
            )
        count = weight / self._weight
        states = self._metrics.read(count, self._of_batches)
        found = self._own_logs(logs)
        self.log_names = list(found)
        numbers = [tf.reshape(tf.cast(value, tf.float32), [1]) * weight for value in found.values()]
        total = self._sum(
            [], [*(state * self._weight for state in states), *numbers], weight, "states and logs"
        )
        self._hold()
        return total

    @contextmanager
    def _intercepting(self, weight: Any, seed: Any) -> Iterator[None]:
        """Sum gradients where optimizers apply them, and see to random numbers and statistics."""
        with ExitStack() as stack:
            for kind in optimizer_classes(self._keras):
                stack.enter_context(_replacing(kind, "apply", self._applying(weight)))
            stack.enter_context(
                _replacing(self._keras.layers.BatchNormalization, "call", self._normalizing())
            )
            stack.enter_context(_replacing(self._keras.metrics.Mean, "update_state", self._averaging()))
            drawn = stack.enter_context(repeatable_draws(self._tf, seed))
            yield
            self.has_draws = bool(drawn)

    def _applying(self, weight: Any) -> Callable[[Any], Any]:
        def wrap(original: Any) -> Any:
            def apply(optimizer: Any, gradients: Any, trainable_variables: Any = None) -> Any:
                if self._is_applying:  # an optimizer that wraps another one
                    return original(optimizer, gradients, trainable_variables)
                self._check_graph()
                variables = trainable_variables
                variables = optimizer._trainable_variables if variables is None else list(variables)
                if not optimizer.built:
                    _run_eagerly(lambda: optimizer.build(variables))
                summed = self._sum_gradients(optimizer, list(gradients), variables, weight)
                self._is_applying = True
                try:
                    return original(optimizer, summed, variables)
                finally:
                    self._is_applying = False

            return apply

        return wrap

    _is_applying = False

    def _sum_gradients(
        self, optimizer: Any, gradients: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        """Return the mean gradients of all ranks' samples, with None where a variable has none."""
        tf = self._tf
        dense = [tf.convert_to_tensor(one) for one in gradients if one is not None]
        trained = [one for one, gradient in zip(variables, gradients, strict=True) if gradient is not None]
        self.applied.append((optimizer, variables))
        if not dense:
            return gradients
        name = f"gradients of {len(trained)} variables for {optimizer.name}"
        # TensorFlow does not know the shape of every gradient, as of an embedding.
        shaped = [tf.reshape(one, variable.shape) for one, variable in zip(dense, trained, strict=True)]
        own = [tf.cast(one, tf.float32) * weight for one in shaped]
        total = self._sum(own, [], weight, name)
        means = iter(unflatten(total[: size_of(trained)] / total[-1], trained, tf))
        types = iter(one.dtype for one in dense)
        return [None if one is None else tf.cast(next(means), next(types)) for one in gradients]

    def _sum(self, gradients: list[Any], others: list[Any], weight: Any, name: str) -> Any:
        """Sum over the ranks; return the total, and bring all state to that of the pooled batch."""
        tf, number = self._tf, len(self.layouts)
        states, update = self._take_states(weight)
        flat = [[tf.reshape(one, [-1]) for one in part] for part in (gradients, states, others)]
        sizes = (sum(int(one.shape[0]) for one in part) for part in flat)
        self.layouts.append(SumLayout(name, *sizes))
        own = tf.concat([*flat[0], *flat[1], *flat[2], tf.zeros([0])], axis=0)
        own = tf.where(weight > 0, own, tf.zeros_like(own))
        own = tf.concat([own, tf.reshape(weight, [1])], axis=0)
        total = tf.numpy_function(
            lambda part: self._call_exchange(number, part), [own], tf.float32, stateful=True
        )
        total.set_shape(own.shape)
        layout = self.layouts[number]
        update((total / total[-1])[layout.num_gradients :][: layout.num_states])
        return total

    def _call_exchange(self, number: int, part: Array) -> Array:
        try:
            return np.array(self._exchange(number, part), np.float32)
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else None
            raise

    def _normalizing(self) -> Callable[[Any], Any]:
        tf = self._tf

        def wrap(original: Any) -> Any:
            def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
                rate = 1.0 - float(layer.momentum)
                is_moving = training and layer.trainable and rate > 0 and not getattr(layer, "renorm", False)
                if not is_moving or tf.compat.v1.get_default_graph() is not self._main:
                    return original(layer, inputs, training=training, mask=mask)
                mean, variance = layer.moving_mean.value, layer.moving_variance.value
                old = tf.identity(mean), tf.identity(variance)
                outputs = original(layer, inputs, training=training, mask=mask)
                moved, spread = pooled_spread(mean - old[0], variance - old[1], rate)
                self._norms.append(_Norm(layer, moved, spread))
                # Every call starts from the statistics before the step: only so can calls be pooled.
                mean.assign(old[0])
                variance.assign(old[1])
                return outputs

            return call

        return wrap

    def _averaging(self) -> Callable[[Any], Any]:
        def wrap(original: Any) -> Any:
            def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
                is_number = sample_weight is None and len(getattr(values, "shape", ())) == 0
                if is_number and not any(metric is one for one in self._of_batches):
                    self._of_batches.append(metric)
                return original(metric, values, sample_weight=sample_weight)

            return update_state

        return wrap

    def _take_states(self, weight: Any) -> tuple[list[Any], Callable[[Any], None]]:
        """Return the changes of state since the last sum, times n, and what applies their means."""
        tf = self._tf
        norms, self._norms = list(self._norms), []
        differing = self._find_differing()
        changes = [part for norm in norms for part in (norm.moved, norm.spread)]
        bases = [self._base_of(variable) for variable in differing]
        changes += [
            tf.cast(one, tf.float32) - tf.cast(base, tf.float32)
            for one, base in zip(differing, bases, strict=True)
        ]
        self._states += [(norm.layer.name, 2 * math.prod(norm.moved.shape)) for norm in norms]
        self._states += [("", math.prod(variable.shape)) for variable in differing]

        def update(mean: Any) -> None:
            parts = iter(tf.split(mean, [math.prod(one.shape) for one in changes]) if changes else ())
            starts = {id(norm.layer): [tf.identity(one) for one in _statistics(norm.layer)] for norm in norms}
            for norm in norms:
                moved, spread = (tf.reshape(next(parts), norm.moved.shape) for _ in range(2))
                _move_statistics(norm.layer, starts[id(norm.layer)], moved, spread, tf)
            for variable, base in zip(differing, bases, strict=True):
                change = tf.reshape(next(parts), variable.shape)
                change = change if variable.dtype.is_floating else tf.round(change)
                variable.assign(base + tf.cast(change, variable.dtype))
                self._bases[id(variable)] = tf.identity(variable)

        return [change * weight for change in changes], update

    def _find_differing(self) -> list[Any]:
        """Return the variables that differ by rank now; raises WorkerError for those without a mean."""
        passing = self._passing()
        graph = StepGraph(self._main, {id(one.handle) for one in passing})
        self.drawing = graph.drawing
        of_optimizers = [one for optimizer, _ in self.applied for one in optimizer.variables]
        trained = [one for _, variables in self.applied for one in variables]
        known = {id(one.value) for one in (*trained, *of_optimizers)} | {id(one) for one in passing}
        found = [one for one in graph.differing if id(one) not in known]
        for variable in found:
            if not _is_number(variable):
                raise WorkerError(
                    f"train_step writes {variable.name}, {variable.dtype.name}, by the samples of its batch",
                    remedy="only numbers can be averaged over ranks",
                    exit_code=2,
                )
        return found

    def _passing(self) -> list[Any]:
        """Return the variables that every step sets anew: random states, and those of metrics."""
        metrics = [variable.value for metric in self.model.metrics for variable in metric.variables]
        return [*(state.value for state in self.seeds.states), *metrics]

    def _base_of(self, variable: Any) -> Any:
        """Return the value after the last sum, or before the step."""
        if id(variable) not in self._bases:
            self._bases[id(variable)] = self._tf.identity(self._held_of(variable))
        return self._bases[id(variable)]

    def _held_of(self, variable: Any) -> Any:
        """Return the variable that holds the value before the step."""
        if id(variable) not in self._held:
            held = _run_eagerly(lambda: self._tf.Variable(variable, trainable=False))
            self._held[id(variable)] = variable, held
        return self._held[id(variable)][1]

    def _hold(self) -> None:
        """Make what saves and restores all that the step writes."""
        tf = self._tf
        passing = {id(one) for one in self._passing()}
        self._written = [one for one in StepGraph(self._main, ()).written if id(one) not in passing]
        for variable in self._written:
            self._held_of(variable)
        pairs = list(self._held.values())
        self._save = _assigning([(held, one) for one, held in pairs], tf)
        self._restore = _assigning(pairs, tf)

    def _evaluate_graph(self, samples: Any, labels: Any) -> Any:
        tf = self._tf
        self._metrics.reset()
        averaged: list[Any] = []
        before, self._of_batches = self._of_batches, averaged
        with _replacing(self._keras.metrics.Mean, "update_state", self._averaging()):
            logs = self._call(self.model.test_step, samples, labels)
        self._of_batches = before
        count = tf.cast(tf.shape(tf.nest.flatten(samples)[0])[0], tf.float32)
        found = self._own_logs(logs)
        missing = tf.constant(math.nan)
        numbers = [tf.reshape(tf.cast(found.get(name, missing), tf.float32), [1]) for name in self.log_names]
        states = self._metrics.read(count, averaged)
        return tf.concat([*states, *(one * count for one in numbers), [count]], axis=0) * self._weight

    def _call(self, code: Any, samples: Any, labels: Any) -> Any:
        """Call a step with one batch as Keras' fit does."""
        code = getattr(code, "python_function", code)  # of a method that is a tf.function itself
        return code(self._unpack(samples, labels))

    def _unpack(self, samples: Any, labels: Any) -> Any:
        """Return the batch as fit passes it: x, (x, y) or (x, y, sample_weight)."""
        tf = self._tf
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
        return values if is_symbolic else scale(values, self._input_range, None, self._tf)

    def _own_logs(self, logs: Any) -> dict[str, Any]:
        """Return the numbers of what a step returned that are not results of the model's metrics."""
        named = set(self._named)
        numbers = {name: self._tf.convert_to_tensor(value) for name, value in _flat_logs(logs)}
        return {
            name: value
            for name, value in numbers.items()
            if name not in named and value.shape.rank == 0 and _is_number(value)
        }

    # --- one process ---

    def _tensors(self, images: Array, labels: Array) -> tuple[Any, Any]:
        return as_tensors(images, self._tf), as_tensors(labels, self._tf)

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
                self._step(*self._tensors(images, labels), *map(self._tf.convert_to_tensor, (weight, seed)))
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
        return Sums(self._find_loss(states, count) * count, tuple(states), count)

    def _find_loss(self, states: list[float], count: float) -> float:
        """Return what is reported as the loss: `loss`, else the first name with it, else the first of all."""
        if not count:
            return 0.0
        found = self._results(states, count)
        name = min(found, key=lambda name: (name != LOSS, LOSS not in name), default="")
        return found.get(name, math.nan)

    def _check_graph(self) -> None:
        """Raise WorkerError inside of a condition or a loop, which ranks may run through differently."""
        graph = self._tf.compat.v1.get_default_graph()
        while graph is not self._main:
            if type(graph).__name__.startswith(("Cond", "While")):
                raise WorkerError(
                    "train_step applies gradients inside of a condition or a loop of TensorFlow",
                    remedy="use a condition or a loop of Python, which is the same on all ranks",
                    exit_code=2,
                )
            graph = graph.outer_graph

    def _set_first_rate(self, recipe: Recipe) -> None:
        if len(self.optimizers) == 1 and self._rates[0] and recipe.learning_rate:
            self._rates[0] = recipe.learning_rate


AnyStep = Step | CustomStep


def make_step(
    model: Any,
    recipe: Recipe,
    example: tuple[Array, Array],
    tf: Any,
    keras: Any,
    *,
    rank: int = 0,
    weight: float = 1.0,
    noise: Noise | None = None,
) -> AnyStep:
    """Return the step of a compiled model, which may have its own train_step; arguments as of `Step`."""
    if not has_own_step(model, keras):
        return Step(model, recipe, example, tf, keras, rank=rank, weight=weight, noise=noise)
    if noise:
        raise WorkerError(
            f"{type(model).__name__} has its own train_step: csdctl cannot clip the gradient of each sample",
            remedy="train without data.private.noise",
            exit_code=2,
        )
    return CustomStep(model, recipe, example, tf, keras, rank=rank, weight=weight)


class _Held:
    """A tf.Variable with the interface of Keras' variables."""

    def __init__(self, variable: Any) -> None:
        self.value, self.assign = variable, variable.assign
        self.shape, self.dtype, self.path = variable.shape, variable.dtype.name, variable.name


@contextmanager
def _replacing(kind: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Let `wrap(original)` take the place of a method, if the class defines it itself."""
    if name not in vars(kind):
        yield
        return
    with mock.patch.object(kind, name, wrap(vars(kind)[name])):
        yield


@contextmanager
def repeatable_draws(tf: Any, seed: Any) -> Iterator[list[None]]:
    """Let tf.random draw numbers that follow from `seed`, shape (2,), int32, and the order of the calls."""

    def next_seed() -> Any:
        drawn.append(None)
        return tf.random.experimental.stateless_fold_in(seed, len(drawn))

    def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32, **_: Any) -> Any:
        return tf.random.stateless_normal(shape, next_seed(), mean, stddev, dtype)

    def truncated(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32, **_: Any) -> Any:
        return tf.random.stateless_truncated_normal(shape, next_seed(), mean, stddev, dtype)

    def uniform(shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = tf.float32, **_: Any) -> Any:
        maxval = 1 if maxval is None and tf.as_dtype(dtype).is_floating else maxval
        return tf.random.stateless_uniform(shape, next_seed(), minval, maxval, dtype)

    def categorical(logits: Any, num_samples: Any, dtype: Any = None, **_: Any) -> Any:
        return tf.random.stateless_categorical(logits, num_samples, next_seed(), dtype or tf.int64)

    def shuffle(value: Any, **_: Any) -> Any:
        return tf.random.experimental.stateless_shuffle(value, next_seed())

    drawn: list[None] = []
    own: dict[str, Any] = {"normal": normal, "truncated_normal": truncated, "uniform": uniform}
    own |= {"categorical": categorical, "shuffle": shuffle}
    with mock.patch.multiple(tf.random, **own):
        yield drawn


def _run_eagerly(code: Callable[[], Any]) -> Any:
    """Return what `code` returns outside of the graph that is being traced: graphs belong to their thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(code).result()


def _assigning(pairs: Sequence[tuple[Any, Any]], tf: Any) -> Callable[[], None]:
    """Return a graph that assigns the second of each pair to the first."""

    def assign() -> None:
        for variable, value in pairs:
            variable.assign(value, read_value=False)

    graph: Callable[[], None] = tf.function(assign, autograph=False, input_signature=[])
    return graph


def _flat_logs(logs: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of what a step returned, as fit does: results of a metric may be a dict."""
    for name, value in logs.items() if isinstance(logs, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _flat_logs(value)
        else:
            yield str(name), value


def _is_number(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer)


def _keep(number: int, part: Array) -> Array:
    """Return the sum of a rank without other ranks."""
    return part


def _symbolic(keras: Any) -> Callable[[Any], Any]:
    return lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name)


def _statistics(layer: Any) -> tuple[Any, Any]:
    return layer.moving_mean.value, layer.moving_variance.value


def _move_statistics(layer: Any, starts: Sequence[Any], moved: Any, spread: Any, tf: Any) -> None:
    """Move the statistics of a batch norm as one call with the pooled batch does; inside a graph.

    `starts`: the statistics that `moved` and `spread`, means over ranks, are relative to.
    """
    rate = 1.0 - float(layer.momentum)
    mean, variance = _statistics(layer)
    pooled = starts[1] + (spread - moved * moved / rate) / rate
    variance.assign(tf.maximum(variance + rate * (pooled - variance), 0.0))
    mean.assign(mean + rate * (starts[0] + moved / rate - mean))


def constant_rate(optimizer: Any) -> float:
    """Return the learning rate of an optimizer; 0 if it follows a schedule of its own."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    is_constant = hasattr(getattr(optimizer, "_learning_rate", None), "assign")
    return float(np.asarray(optimizer.learning_rate.value)) if is_constant else 0.0
