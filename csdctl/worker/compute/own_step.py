"""The functions of a step that a user's own train_step takes: its optimizers get what ranks have summed.

The author's train_step runs as it is written on every rank. Where it applies gradients (`apply` or
`apply_gradients` of an optimizer), each rank gives its gradients times its number of samples n to a sum over
the ranks, and the optimizer gets Σ n g / Σ n, so every loss must be a mean over the samples of the batch. A
step has one sum for each time that it applies gradients, in the order of the trace, and a last one:

    [ n · gradients | n · changes of state | n | stop | seconds ]
    [ n · changes of state | states of metrics | n · logs | n | stop | seconds ]

The function is cut at these sums. State that differs by rank is summed with the next of them: of the
statistics of batch norm the pooled batch's are computed for each call, of all other state the mean of the
changes. A metric of the model starts anew in every step, and the states of all ranks are summed. Every other
number that train_step returns is averaged over the samples. Random numbers of keras.random and of tf.random
follow (seed, rank, step), as those of layers do.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from csdctl.worker.compute.backend import STATE, keras, tf
from csdctl.worker.compute.keras_internals import build_symbolically, find_globals, optimizer_classes
from csdctl.worker.compute.objective import MetricStates, noting_batches, scale, specs_of, symbolic
from csdctl.worker.compute.statistics import Seeds, pooled_spread
from csdctl.worker.compute.step_compiler import BATCH, Compiler
from csdctl.worker.compute.trace import GraphBuilder, run_eagerly, unflatten
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.step import EVALUATE, OWN, Slice, StepInfo, SumInfo
from csdctl.worker.process.errors import InputError, WorkerError, describe
from csdctl.worker.protocol.datasets import INPUT, OUTPUT, SAMPLE_WEIGHT, is_position
from csdctl.worker.protocol.recipe import Recipe

DRAWING = (
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "Multinomial",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoissonV2",
    "SampleDistortedBoundingBoxV2",
    "UniformCandidateSampler",
    "LogUniformCandidateSampler",
    "LearnedUnigramCandidateSampler",
)
"""Types of the operations that draw from a state of their own, which no step can set again."""


def has_own_step(model: Any) -> bool:
    """Return whether training calls code of the user's in place of Keras' train_step."""
    return getattr(model.train_step, "__func__", None) is not keras.Model.train_step


def constant_rate(optimizer: Any) -> float:
    """Return the learning rate of an optimizer. 0 if it follows a schedule of its own."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    is_constant = hasattr(getattr(optimizer, "_learning_rate", None), "assign")
    return float(np.asarray(optimizer.learning_rate.value)) if is_constant else 0.0


class OwnStepCompiler(Compiler):
    """The step of a model with a train_step of its own."""

    def __init__(
        self, model: Any, recipe: Recipe, example: tuple[Array, Array], *, has_validation: bool = False
    ) -> None:
        """`example` as of StepCompiler. Raises WorkerError, exit code 2, if ranks cannot take the step."""
        super().__init__(model, recipe)
        self.seeds = Seeds(model, recipe.seed, find_globals(model))
        self.signature = specs_of(example)
        self._has_validation = has_validation
        self._name = f"{getattr(model.train_step, '__name__', 'train_step')} of {type(model).__name__}"
        build_symbolically(model, self._unpack(*tf.nest.map_structure(symbolic, self.signature)))
        optimizers = self._create()
        self.metric_states = MetricStates(self._find_metrics())
        rates = [constant_rate(one) for one in optimizers]
        if len(optimizers) == 1 and rates[0] and recipe.learning_rate:
            rates[0] = recipe.learning_rate
        self.first_rate = recipe.learning_rate or next((rate for rate in rates if rate), 1.0)
        """The rate that the others are relative to."""
        pairs = zip(optimizers, rates, strict=True)
        self._rates = [(one.learning_rate, rate / self.first_rate) for one, rate in pairs if rate]
        left_out = {id(one) for one, _ in self._rates}
        state = [*model.weights, *(one for each in optimizers for one in each.variables)]
        self.variables = [one for one in state if id(one) not in left_out]
        self._optimizers = optimizers

    def trace(self, builder: GraphBuilder) -> StepInfo:
        """As of Compiler."""
        scalars = {name: tf.TensorSpec((), tf.float32) for name in ("rate", "weight", "count")}
        seeds = {"seeds": tf.TensorSpec((len(self.seeds.states), 2), tf.int64)}
        draw = {"draw": tf.TensorSpec((2,), tf.int32)}
        self._builder = builder
        with self._explaining():
            self._add(builder, (OWN,), self._step, seeds, draw, scalars, *BATCH)
        if self._has_validation:
            remedy = "define test_step, compile the model with a loss, or leave out data.validation"
            with explaining(f"test_step of {type(self.model).__name__} fails", remedy):
                self._add(builder, (EVALUATE,), self._evaluate, seeds, *BATCH)
        parts, place, normalizing = self._states.parts, 0, list[Slice]()
        for name, size in parts:
            if name:
                normalizing.append(Slice(name, place, place + size))
            place += size
        sums = tuple(self._traced.sums)
        return self._describe(
            builder,
            num_gradients=sum(one.num_gradients for one in sums),
            num_statistics=sum(one.num_states for one in sums),
            num_states=sums[-1].num_others - 1,
            has_loss_scaling=any(hasattr(one, "inner_optimizer") for one in self._optimizers),
            normalizing=tuple(normalizing),
            averages=self._averages(self._optimizers),
            sums=sums,
            logs=tuple(self._logs),
            updated=self._updated(),
        )

    def _updated(self) -> tuple[tuple[int, ...], ...]:
        places = {id(one): place for place, one in enumerate(self.variables)}
        applied = self._traced.applied
        optimizers = {id(one): one for one, _ in applied}.values()
        groups = [
            [one for _, variables in applied for one in variables],
            *(one.variables for one in optimizers),
        ]
        return tuple(
            tuple(sorted({places[id(one)] for one in group if id(one) in places})) for group in groups
        )

    # --- functions ---

    def _create(self) -> list[Any]:
        """Call train_step once, which creates state, as of metrics of compile(). Return its optimizers."""
        applied: dict[int, Any] = {}

        def note(optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
            applied[id(optimizer)] = optimizer
            if not optimizer.built:
                run_eagerly(lambda: optimizer.build(variables))
            return gradients

        def create(samples: Any, labels: Any) -> None:
            with replacing_apply(note):
                self._call(self.model.train_step, samples, labels)

        with self._explaining():
            function = tf.function(create, autograph=False, input_signature=self.signature)
            function.get_concrete_function()
        if not applied:
            raise InputError(
                f"{self._name} applies no gradients by a Keras optimizer",
                "call optimizer.apply(gradients, variables) in it",
            )
        return list(applied.values())

    def _explaining(self) -> Any:
        remedy = "see docs/reference/models.md on models with their own train_step"
        return explaining(f"{self._name} cannot be traced", remedy)

    def _step(
        self, state: Any, seeds: Any, draw: Any, rate: Any, weight: Any, count: Any, *batch: Any
    ) -> list[Any]:
        of_rank = [seeds, draw, weight, count, *tf.nest.flatten(batch)]
        with self._given(state, seeds, rate):
            drawn = [self._now(one) for one in self.seeds.states]
            passing = [*self.seeds.states, *self.metric_states.variables]
            self._states = BatchStates(self._values, self.variables, passing, of_rank)
            self._traced = Interception(self._states, self._builder, weight * count, weight)
            self.metric_states.reset()
            with self._traced.active(draw):
                logs = self._call(self.model.train_step, *batch)
            self._check_draws()
            self._note_draws(drawn)
            if self._traced.has_draws:
                self.drawing["tf.random"] = None
            states = self.metric_states.read((metric, count) for metric in self._traced.of_batches)
            numbers = self._own_logs(logs)
            self._logs = list(numbers)
            others = [state * weight for state in states]
            others += [tf.cast(value, tf.float32) * (weight * count) for value in numbers.values()]
            self._traced.sum([], others, "states and logs")
            return self._new_state()

    def _check_draws(self) -> None:
        operations = tf.compat.v1.get_default_graph().get_operations()
        if drawing := sorted({one.type for one in operations} & set(DRAWING)):
            raise InputError(
                f"train_step draws random numbers by {', '.join(drawing)}, which "
                "cannot be repeated when a step is done again",
                "draw with keras.random, or with tf.random.normal, uniform or categorical",
            )

    def _evaluate(self, state: Any, seeds: Any, samples: Any, labels: Any) -> Any:
        averaged: list[Any] = []
        with self._given(state, seeds), noting_batches(averaged):
            self.metric_states.reset()
            logs = self._own_logs(self._call(self.model.test_step, samples, labels))
            count = tf.cast(tf.shape(tf.nest.flatten(samples)[0])[0], tf.float32)
            missing = tf.constant(math.nan)
            numbers = [tf.cast(logs.get(name, missing), tf.float32) * count for name in self._logs]
            states = self.metric_states.read((metric, count) for metric in averaged)
            return tf.concat([*states, *(tf.reshape(one, [1]) for one in (*numbers, count))], axis=0)

    def _find_metrics(self) -> list[Any]:
        """Return the metrics of the model, and global ones of its step."""
        kind = keras.metrics.Metric
        named = [one for one in (*self.model.metrics, *find_globals(self.model)) if isinstance(one, kind)]
        return list({id(one): one for one in named}.values())

    def _call(self, code: Any, samples: Any, labels: Any) -> Any:
        """Call a step with one batch as Keras' fit does."""
        code = getattr(code, "python_function", code)  # of a method that is a tf.function itself
        return code(self._unpack(samples, labels))

    def _unpack(self, samples: Any, labels: Any) -> Any:
        """Return the batch as fit passes it: x, (x, y) or (x, y, sample_weight)."""
        return unpack(samples, labels, self.recipe.input_range)

    def _own_logs(self, logs: Any) -> dict[str, Any]:
        """Return the numbers of what a step returned, results of the model's metrics included."""
        numbers = {name: tf.convert_to_tensor(value) for name, value in _flat_logs(logs)}
        return {name: value for name, value in numbers.items() if value.shape.rank == 0 and is_number(value)}


def unpack(samples: Any, labels: Any, input_range: tuple[float, float] | None) -> Any:
    """Return a batch of tensors as fit passes it to a step: x, (x, y) or (x, y, sample_weight)."""

    def scaled(values: Any) -> Any:
        is_symbolic = type(values).__name__ == "KerasTensor"
        return values if is_symbolic else scale(values, input_range, None)

    parts = tf.nest.map_structure(scaled, samples)
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


def _flat_logs(logs: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of what a step returned, as fit does: results of a metric may be a dict."""
    for name, value in logs.items() if isinstance(logs, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _flat_logs(value)
        else:
            yield str(name), value


@contextmanager
def explaining(problem: str, remedy: str) -> Iterator[None]:
    """Raise the WorkerError that an error is due to, or one with the problem."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause and not isinstance(cause, WorkerError):  # TensorFlow wraps what a tf.function raises
            cause = cause.__cause__ or cause.__context__
        if cause:
            raise cause from None
        raise InputError(f"{problem}: {describe(error)}", remedy) from error


def is_number(tensor: Any) -> bool:
    """Return whether a tensor has numbers, which can be averaged."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer)


class BatchStates:
    """The state that a step writes beside what its optimizers train, in one trace of the step."""

    def __init__(self, values: Any, variables: Sequence[Any], passing: Any, of_rank: Iterable[Any]) -> None:
        """`values`, a Values, of `variables`, the state.

        `passing`: variables that every step sets anew. `of_rank`: tensors that differ by rank.
        """
        self._values = values
        self.graph = tf.compat.v1.get_default_graph()
        """That of the step."""
        self.parts: list[tuple[str, int]] = []
        """The parts of the summed changes, in order: the layer's name, '' for others, and the size."""
        self._variables = [one.value for one in variables]
        self._passing = {id(one.value) for one in passing}
        self._of_rank = {one.op.name for one in of_rank}
        self._norms: list[tuple[Any, Any, Any]] = []
        """The calls of batch norms since the last sum: layer, and moves of its statistics."""
        self._bases = {id(one): values.get(one) for one in self._variables}
        """The values after the last sum, or before the step, by the id of the variable."""

    def normalizing(self, original: Any) -> Any:
        """Return what takes the place of the call of batch norms."""

        def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            rate = 1.0 - float(layer.momentum)
            is_moving = training and layer.trainable and rate > 0 and not getattr(layer, "renorm", False)
            if not is_moving or tf.compat.v1.get_default_graph() is not self.graph:
                return original(layer, inputs, training=training, mask=mask)
            mean, variance = _statistics(layer)
            old = tf.identity(mean), tf.identity(variance)
            outputs = original(layer, inputs, training=training, mask=mask)
            self._norms.append((layer, *pooled_spread(mean - old[0], variance - old[1], rate)))
            # Every call starts from the statistics before the step: only so can calls be pooled.
            mean.assign(old[0])
            variance.assign(old[1])
            return outputs

        return call

    def take(self, weight: Any, trained: Iterable[Any]) -> tuple[list[Any], Callable[[Any], None]]:
        """Return the changes since the last sum, times `weight`, and what applies their means.

        `trained`: variables that are left out, because the step still trains them.
        """
        norms, self._norms = self._norms, []
        differing = self._find_differing({id(one.value) for one in trained})
        changes = [move for _, *moves in norms for move in moves]
        bases = [self._bases[id(variable)] for variable in differing]
        changes += [
            tf.cast(one, tf.float32) - tf.cast(base, tf.float32)
            for one, base in zip(differing, bases, strict=True)
        ]
        self.parts += [(layer.name, 2 * math.prod(moved.shape)) for layer, moved, _ in norms]
        self.parts += [("", math.prod(variable.shape)) for variable in differing]

        def update(mean: Any) -> None:
            parts = iter(tf.split(mean, [math.prod(one.shape) for one in changes]) if changes else ())
            starts = {id(layer): [tf.identity(one) for one in _statistics(layer)] for layer, _, _ in norms}
            for layer, *moves in norms:
                moved, spread = (tf.reshape(next(parts), move.shape) for move in moves)
                _move_statistics(layer, starts[id(layer)], moved, spread)
            for variable, base in zip(differing, bases, strict=True):
                change = tf.reshape(next(parts), variable.shape)
                change = change if variable.dtype.is_floating else tf.round(change)
                variable.assign(base + tf.cast(change, variable.dtype))
                self._bases[id(variable)] = self._values.get(variable)

        return [change * weight for change in changes], update

    def _find_differing(self, trained: set[int]) -> list[Any]:
        """Return the tf.Variables that differ by rank now. Raises WorkerError for those without a mean.

        A change that does not depend on batch or random numbers, but for a sum over the ranks, is the same on
        every rank, such as that of a moving average of the weights.
        """
        unknown = self._values.unknown
        self._bases = {key: inner for key, (_, inner) in unknown.items()} | self._bases
        others = [variable for variable, _ in unknown.values()]
        left_out = trained | self._passing
        differing = [
            one
            for one in (*self._variables, *others)
            if id(one) not in left_out and self._is_of_rank(self._values.get(one), self._bases[id(one)])
        ]
        for variable in differing:
            if not is_number(variable):
                raise InputError(
                    f"train_step writes {variable.name}, {variable.dtype.name}, from samples of its batch",
                    "only numbers can be averaged over ranks",
                )
        return differing

    def _is_of_rank(self, tensor: Any, base: Any) -> bool:
        waiting, seen = [] if tensor is base else [tensor.op], set[str]()
        while waiting:
            operation = waiting.pop()
            if operation.name in self._of_rank:
                return True
            if operation.name not in seen:
                seen.add(operation.name)
                waiting += [one.op for one in operation.inputs]
        return False


def _statistics(layer: Any) -> tuple[Any, Any]:
    return layer.moving_mean.value, layer.moving_variance.value


def _move_statistics(layer: Any, starts: Sequence[Any], moved: Any, spread: Any) -> None:
    """Move the statistics of a batch norm as one call with the pooled batch does.

    `starts`: the statistics that `moved` and `spread`, means over ranks, are relative to.
    """
    rate = 1.0 - float(layer.momentum)
    mean, variance = _statistics(layer)
    moved, spread = tf.cast(moved, mean.dtype), tf.cast(spread, mean.dtype)
    pooled = starts[1] + (spread - moved * moved / rate) / rate
    variance.assign(tf.maximum(variance + rate * (pooled - variance), 0.0))
    mean.assign(mean + rate * (starts[0] + moved / rate - mean))


class Interception:
    """One trace of a step, and its sums."""

    def __init__(self, states: BatchStates, builder: GraphBuilder, weight: Any, of_sample: Any) -> None:
        """`weight`: n times `of_sample`, the weight of each sample."""
        self._states, self._builder, self._weight, self._of_sample = states, builder, weight, of_sample
        self._of_sums: dict[int, Any] = {}
        """Gradients of losses with a value for each sample, which TensorFlow adds, by their ids."""
        self.applied: list[tuple[Any, list[Any]]] = []
        """The optimizers, and the variables that they train."""
        self.sums: list[SumInfo] = []
        """The sums, in their order."""
        self.of_batches: list[Any] = []
        """Metrics that a number was added to for the whole batch."""
        self.has_draws = False
        """Whether the step draws numbers by tf.random."""

    @contextmanager
    def active(self, seed: Any) -> Iterator[None]:
        """Sum gradients where optimizers apply them, and see to random numbers and statistics."""
        with (
            replacing_apply(self._sum_gradients),
            replacing(tf.GradientTape, "gradient", self._noting_sums),
            replacing(keras.layers.BatchNormalization, "call", self._states.normalizing),
            noting_batches(self.of_batches),
            repeatable_draws(seed) as drawn,
        ):
            yield
        self.has_draws = bool(drawn)
        if self._of_sums:
            raise InputError(
                "train_step changes the gradient of a loss with a value for each sample before it applies it",
                "take the mean of the loss first: tf.reduce_mean(loss)",
            )

    def _noting_sums(self, original: Any) -> Any:
        """Return what takes the place of `GradientTape.gradient`."""

        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
            result = original(tape, target, sources, *args, **options)
            of_variables = all(hasattr(one, "assign") for one in tf.nest.flatten(sources))
            targets = [one for one in tf.nest.flatten(target) if one is not None]
            if of_variables and any(one.shape.rank and one.shape.num_elements() != 1 for one in targets):
                self._of_sums |= {id(one): one for one in tf.nest.flatten(result) if one is not None}
            return result

        return gradient

    def sum(self, gradients: list[Any], others: list[Any], name: str) -> Any:
        """Sum over the ranks. Return the total, and bring all state to that of the pooled batch.

        `gradients` and `others`: tensors that are weighted already. The last sum has no gradients.
        """
        weight = self._weight
        # The last sum also has what the step itself has written to variables that it trains.
        trained = [one for each, variables in self.applied for one in (*variables, *each.variables)]
        states, update = self._states.take(weight, trained if gradients else ())
        flat = [[tf.reshape(one, [-1]) for one in part] for part in (gradients, states, others)]
        of_gradients, of_states, of_others = (sum(int(one.shape[0]) for one in part) for part in flat)
        info = SumInfo(name, of_gradients, of_states, of_others)
        self.sums.append(info)
        own = tf.concat([*flat[0], *flat[1], *flat[2], tf.zeros([0])], axis=0)
        own = tf.where(weight > 0, own, tf.zeros_like(own))
        own = tf.concat([own, tf.reshape(weight, [1])], axis=0)
        (total,) = self._builder.cut([own], [(tf.float32, own.shape)])
        with tf.device(STATE):
            update((total / total[-1])[info.num_gradients :][: info.num_states])
        return total

    def _sum_gradients(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the mean gradients of all ranks' samples, with None where a variable has none."""
        self._check_graph()
        dense = [tf.convert_to_tensor(one) for one in gradients if one is not None]
        trained = [one for one, gradient in zip(variables, gradients, strict=True) if gradient is not None]
        self.applied.append((optimizer, variables))
        if not dense:
            return gradients
        are_sums = {self._of_sums.pop(id(one), None) is not None for one in gradients if one is not None}
        if len(are_sums) > 1:
            raise InputError(
                "train_step applies gradients of losses with a value for each sample and of means together",
                "take the mean of every loss: tf.reduce_mean(loss)",
            )
        is_summed = are_sums == {True}
        weight = self._of_sample if is_summed else self._weight
        # TensorFlow does not know the shape of every gradient, as of an embedding.
        shaped = [tf.reshape(one, variable.shape) for one, variable in zip(dense, trained, strict=True)]
        own = [tf.cast(one, tf.float32) * weight for one in shaped]
        total = self.sum(own, [], f"gradients of {len(trained)} variables for {optimizer.name}")
        self.sums[-1] = info = replace(self.sums[-1], is_summed=is_summed)
        gradient = total[: info.num_gradients] / (1 if is_summed else total[-1])
        means = iter(unflatten(gradient, trained))
        types = iter(one.dtype for one in dense)
        return [None if one is None else tf.cast(next(means), next(types)) for one in gradients]

    def _check_graph(self) -> None:
        """Raise WorkerError inside of a graph of its own, which ranks may run through differently."""
        if tf.compat.v1.get_default_graph() is not self._states.graph:
            raise InputError(
                "train_step applies gradients inside of a condition, a loop or a function of TensorFlow",
                "use conditions and loops of Python, and remove @tf.function: the whole step is traced",
            )


@contextmanager
def replacing_apply(change: Callable[[Any, list[Any], list[Any]], list[Any]]) -> Iterator[None]:
    """Let every optimizer apply what `change` returns of (optimizer, gradients, variables)."""
    is_applying = False

    def wrap(original: Any) -> Any:
        def apply(optimizer: Any, gradients: Any, trainable_variables: Any = None) -> Any:
            nonlocal is_applying
            if is_applying:  # an optimizer that wraps another one
                return original(optimizer, gradients, trainable_variables)
            variables = trainable_variables
            variables = optimizer._trainable_variables if variables is None else list(variables)
            with tf.device(STATE):
                changed = change(optimizer, list(gradients), variables)
                is_applying = True
                try:
                    return original(optimizer, changed, variables)
                finally:
                    is_applying = False

        return apply

    with ExitStack() as stack:
        for kind in optimizer_classes():
            stack.enter_context(replacing(kind, "apply", wrap))
        yield


@contextmanager
def replacing(kind: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Let `wrap(original)` take the place of a method, if the class defines it itself."""
    if name not in vars(kind):
        yield
        return
    with mock.patch.object(kind, name, wrap(vars(kind)[name])):
        yield


@contextmanager
def repeatable_draws(seed: Any) -> Iterator[list[None]]:
    """Let tf.random draw numbers that follow from `seed`, shape (2,), int32, and the order of the calls."""
    graph = tf.compat.v1.get_default_graph()

    def next_seed() -> Any:
        if tf.compat.v1.get_default_graph() is not graph:
            raise InputError(
                "train_step draws from tf.random inside of a condition, a loop or a function of TensorFlow",
                "draw before it, for the whole batch",
            )
        drawn.append(None)
        return tf.random.experimental.stateless_fold_in(seed, len(drawn))

    def stateless(draw: Any) -> Any:
        def call(shape: Any, *args: Any, seed: Any = None, name: Any = None, **options: Any) -> Any:
            return draw(shape, next_seed(), *args, **options)

        return call

    def categorical(logits: Any, num_samples: Any, dtype: Any = None, **_: Any) -> Any:
        return tf.random.stateless_categorical(logits, num_samples, next_seed(), dtype or tf.int64)

    def shuffle(value: Any, **_: Any) -> Any:
        return tf.random.experimental.stateless_shuffle(value, next_seed())

    drawn: list[None] = []
    kinds = ("normal", "truncated_normal", "uniform")
    own = {kind: stateless(getattr(tf.random, f"stateless_{kind}")) for kind in kinds}
    own |= {"categorical": categorical, "shuffle": shuffle}
    with mock.patch.multiple(tf.random, **own):
        yield drawn
