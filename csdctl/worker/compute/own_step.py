"""Compiles a step for models with their own train_step: its optimizers get what ranks have summed.

The author's train_step runs as it is written on every rank. Where it applies gradients (`apply` or
`apply_gradients` of an optimizer), each rank gives its gradients times its number of samples n to a sum over
the ranks, and the optimizer gets Σ n g / Σ n: the loss is a mean over the samples of the batch. Gradients of
a loss with a value for each sample, which TensorFlow adds, are summed without n. A step has one sum for each
time that it applies gradients, in the order of the trace, and a last one:

    [ n · gradients, or gradients | n · changes of state | n | stop | seconds | norm ]
    [ n · changes of state | states of metrics | n · logs | n | stop | seconds | norm ]

The function is cut at these sums. State that differs by rank is summed with the next of them. For the
statistics of batch norm, the statistics of the pooled batch are computed for each call. All other state gets
the mean of the changes. A metric of the model starts anew in every step, and the states of all ranks are
summed. Every other number that train_step returns is averaged over the samples. Random numbers of
keras.random and of tf.random follow (seed, rank, step), like those that layers draw.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from csdctl.worker.compute import keras_internals as internals
from csdctl.worker.compute.backend import STATE, keras, tf
from csdctl.worker.compute.objective import MetricStates, noting_batches, scale, specs_of, symbolic
from csdctl.worker.compute.step_compiler import Compiler, find_random_states, pooled_spread
from csdctl.worker.compute.trace import GraphBuilder, run_eagerly, unflatten
from csdctl.worker.compute.user_code import explaining
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.layout import VectorLayout
from csdctl.worker.engine.step import EVALUATE, OWN, StepInfo, SumInfo
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.datasets import INPUT, OUTPUT, SAMPLE_WEIGHT, is_position
from csdctl.worker.protocol.recipe import Recipe


def has_own_step(model: Any) -> bool:
    """Return whether training calls code of the user's in place of Keras' train_step."""
    return getattr(model.train_step, "__func__", None) is not keras.Model.train_step


class OwnStepCompiler(Compiler):
    """The step of a model with a train_step of its own."""

    def __init__(
        self, model: Any, recipe: Recipe, example: tuple[Array, Array], *, has_validation: bool = False
    ) -> None:
        """`example`: see StepCompiler. Raises WorkerError, exit code 2, if ranks cannot take the step."""
        super().__init__(model, recipe)
        self.random_states = find_random_states(model, internals.find_globals(model))
        self.signature = specs_of(example)
        self._has_validation = has_validation
        self._name = f"{getattr(model.train_step, '__name__', 'train_step')} of {type(model).__name__}"
        samples, labels = tf.nest.map_structure(symbolic, self.signature)
        internals.build_symbolically(model, unpack(samples, labels, recipe.input_range))
        self.optimizers = self._discover_optimizers()
        values = (*model.metrics, *internals.find_globals(model))
        metrics = {id(value): value for value in values if isinstance(value, keras.metrics.Metric)}
        self.metric_states = MetricStates(list(metrics.values()))
        rates = [internals.constant_rate(optimizer) for optimizer in self.optimizers]
        if len(rates) == 1 and rates[0] and recipe.learning_rate:
            rates[0] = recipe.learning_rate
        self.first_rate = recipe.learning_rate or next((rate for rate in rates if rate), 1.0)
        """The rate that the others are relative to."""
        pairs = zip(self.optimizers, rates, strict=True)
        self._rates = [(optimizer.learning_rate, rate / self.first_rate) for optimizer, rate in pairs if rate]
        left_out = set(map(id, self.rates))
        of_optimizers = (variable for optimizer in self.optimizers for variable in optimizer.variables)
        state = [*model.weights, *of_optimizers]
        self.variables = [variable for variable in state if id(variable) not in left_out]

    def trace(self, builder: GraphBuilder) -> StepInfo:
        """See Compiler."""
        self._builder, draw = builder, tf.TensorSpec((2,), tf.int32)
        with self._explaining():
            self._add(builder, (OWN,), self._step, "seeds draw rate weight count samples labels", draw=draw)
        if self._has_validation:
            remedy = "define test_step, compile the model with a loss, or leave out data.validation"
            with explaining(f"test_step of {type(self.model).__name__} fails", remedy):
                self._add(builder, (EVALUATE,), self._evaluate, "seeds samples labels")
        sums = tuple(self._traced.sums)
        layouts = [part.layout for part in sums]
        return self._describe(
            builder,
            VectorLayout(
                sum(layout.num_gradients for layout in layouts),
                sum(layout.num_statistics for layout in layouts),
                layouts[-1].num_states,
            ),
            sums=sums,
            logs=tuple(self._logs),
            updated=self._find_updated(),
        )

    def _find_updated(self) -> tuple[tuple[int, ...], ...]:
        places = {id(variable): place for place, variable in enumerate(self.variables)}
        applied = self._traced.applied
        optimizers = {id(optimizer): optimizer for optimizer, _ in applied}.values()
        trained = [variable for _, variables in applied for variable in variables]
        groups = [trained, *(optimizer.variables for optimizer in optimizers)]
        return tuple(
            tuple(sorted({places[id(variable)] for variable in group if id(variable) in places}))
            for group in groups
        )

    def _discover_optimizers(self) -> list[Any]:
        """Call train_step once, to create state such as compiled metrics. Return its optimizers."""
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
            raise JobError(
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
        with self._given(state, seeds, rate):
            of_rank = [seeds, draw, weight, count, *tf.nest.flatten(batch)]
            self._traced = Interception(self, of_rank, weight=weight * count, of_sample=weight)
            self.metric_states.reset()
            with self._traced.active(draw):
                logs = self._call(self.model.train_step, *batch)
            self._check_draws()
            states = self.metric_states.read((metric, count) for metric in self._traced.of_batches)
            numbers = read_logs(logs)
            self._logs = list(numbers)
            results = [state * weight for state in states]
            results += [tf.cast(value, tf.float32) * (weight * count) for value in numbers.values()]
            self._traced.sum_over_ranks([], results)
            return self._new_state()

    def _check_draws(self) -> None:
        """Raise WorkerError for operations that draw from their own state, which no step can set again."""
        # TensorFlow's operations with a random state of their own have the attributes seed and seed2.
        operations = tf.compat.v1.get_default_graph().get_operations()
        definitions = [operation.op_def for operation in operations]
        drawing = {kind.name for kind in definitions if any(attr.name == "seed2" for attr in kind.attr)}
        if drawing:
            raise JobError(
                f"train_step draws random numbers by {', '.join(sorted(drawing))}, which "
                "cannot be repeated when a step is done again",
                "draw with keras.random, or with tf.random.normal, uniform or categorical",
            )

    def _evaluate(self, state: Any, seeds: Any, samples: Any, labels: Any) -> Any:
        averaged: list[Any] = []
        with self._given(state, seeds), noting_batches(averaged):
            self.metric_states.reset()
            logs = read_logs(self._call(self.model.test_step, samples, labels))
            count = tf.cast(tf.shape(tf.nest.flatten(samples)[0])[0], tf.float32)
            missing = tf.constant(math.nan)
            numbers = [tf.cast(logs.get(name, missing), tf.float32) * count for name in self._logs]
            states = self.metric_states.read((metric, count) for metric in averaged)
            return tf.concat([*states, *(tf.reshape(number, [1]) for number in (*numbers, count))], axis=0)

    def _call(self, code: Any, samples: Any, labels: Any) -> Any:
        code = getattr(code, "python_function", code)  # of a method that is a tf.function itself
        return code(unpack(samples, labels, self.recipe.input_range))


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


def read_logs(logs: Any) -> dict[str, Any]:
    """Return the numbers of what a step returned, as fit does: results of a metric may be a dict."""
    numbers: dict[str, Any] = {}
    for name, value in logs.items() if isinstance(logs, Mapping) else ():
        if isinstance(value, Mapping):
            numbers |= read_logs(value)
        else:
            tensor = tf.convert_to_tensor(value)
            numbers |= {str(name): tensor} if tensor.shape.rank == 0 and is_number(tensor) else {}
    return numbers


def is_number(tensor: Any) -> bool:
    """Return whether a tensor has numbers, which can be averaged."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer)


class Interception:
    """One trace of a step: its sums, and the state that it writes beside what its optimizers train."""

    def __init__(
        self, compiler: OwnStepCompiler, of_rank: Iterable[Any], *, weight: Any, of_sample: Any
    ) -> None:
        """`of_rank`: tensors that differ by rank. `weight`: n times `of_sample`, a sample's weight."""
        self._builder, self._values = compiler._builder, compiler._values
        self._weight, self._of_sample = weight, of_sample
        self._graph = tf.compat.v1.get_default_graph()
        self._variables = [variable.value for variable in compiler.variables]
        set_anew = (*compiler.random_states, *compiler.metric_states.variables)
        self._passing = {id(variable.value) for variable in set_anew}
        self._of_rank = {tensor.op.name for tensor in of_rank}
        self._bases = {id(variable): self._values.get(variable) for variable in self._variables}
        """The values after the last sum, or before the step, by the id of the variable."""
        self._norms: list[tuple[Any, Any, Any]] = []
        """The calls of batch norms since the last sum: layer, and moves of its statistics."""
        self._of_sums: dict[int, Any] = {}
        """Gradients of losses with a value for each sample, which TensorFlow adds, by their ids."""
        self.applied: list[tuple[Any, list[Any]]] = []
        """The optimizers, and the variables that they train."""
        self.sums: list[SumInfo] = []
        self.of_batches: list[Any] = []

    @contextmanager
    def active(self, seed: Any) -> Iterator[None]:
        """Sum gradients where optimizers apply them, and see to random numbers and statistics."""
        with (
            replacing_apply(self._sum_gradients),
            replacing(tf.GradientTape, "gradient", self._noting_sums),
            replacing(keras.layers.BatchNormalization, "call", self._noting_moves),
            noting_batches(self.of_batches),
            repeatable_draws(seed),
        ):
            yield
        if self._of_sums:
            raise JobError(
                "train_step changes the gradient of a loss with a value for each sample before it applies it",
                "take the mean of the loss first: tf.reduce_mean(loss)",
            )

    def _noting_sums(self, original: Any) -> Any:

        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
            result = original(tape, target, sources, *args, **options)
            of_variables = all(hasattr(source, "assign") for source in tf.nest.flatten(sources))
            targets = [tensor for tensor in tf.nest.flatten(target) if tensor is not None]
            are_many = [bool(tensor.shape.rank) and tensor.shape.num_elements() != 1 for tensor in targets]
            if of_variables and any(are_many):
                tensors = tf.nest.flatten(result)
                self._of_sums |= {id(tensor): tensor for tensor in tensors if tensor is not None}
            return result

        return gradient

    def _noting_moves(self, original: Any) -> Any:

        def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            rate = 1.0 - float(layer.momentum)
            is_moving = training and layer.trainable and rate > 0 and not getattr(layer, "renorm", False)
            if not is_moving or tf.compat.v1.get_default_graph() is not self._graph:
                return original(layer, inputs, training=training, mask=mask)
            statistics = _statistics(layer)
            before = [tf.identity(variable) for variable in statistics]
            outputs = original(layer, inputs, training=training, mask=mask)
            moved, changed = (variable - value for variable, value in zip(statistics, before, strict=True))
            self._norms.append((layer, *pooled_spread(moved, changed, rate)))
            # Every call starts from the statistics before the step: only so can calls be pooled.
            for variable, value in zip(statistics, before, strict=True):
                variable.assign(value)
            return outputs

        return call

    def sum_over_ranks(self, gradients: list[Any], results: list[Any]) -> Any:
        """Sum weighted tensors over the ranks. Return the total. Bring all state to the pooled batch's."""
        weight = self._weight
        # The last sum also has what the step itself has written to variables that it trains.
        groups = [(*variables, *optimizer.variables) for optimizer, variables in self.applied]
        trained = [variable for group in groups for variable in group]
        states, update = self._take_states(trained if gradients else ())
        parts = (gradients, [state * weight for state in states], results)
        flat = [[tf.reshape(tensor, [-1]) for tensor in part] for part in parts]
        sizes = [sum(int(tensor.shape[0]) for tensor in part) for part in flat]
        layout = VectorLayout(sizes[0], sizes[1], sizes[2] - 1)
        self.sums.append(SumInfo(layout))
        # All parts may be empty, but concat needs a tensor.
        vector = tf.concat([*flat[0], *flat[1], *flat[2], tf.zeros([0])], axis=0)
        # A rank without samples takes the step with zeros: an infinite gradient, times 0, would be NaN.
        vector = tf.where(weight > 0, vector, tf.zeros_like(vector))
        vector = tf.concat([vector, tf.reshape(weight, [1])], axis=0)
        (total,) = self._builder.cut([vector], [(tf.float32, vector.shape)])
        with tf.device(STATE):
            update((total / total[-1])[layout.statistics])
        return total

    def _take_states(self, trained: Iterable[Any]) -> tuple[list[Any], Callable[[Any], None]]:
        """Return the changes of state since the last sum but of `trained`, and what applies their means."""
        norms, self._norms = self._norms, []
        differing = self._find_differing({id(variable.value) for variable in trained})
        changes = [move for _, *moves in norms for move in moves]
        for variable in differing:
            base = tf.cast(self._bases[id(variable)], tf.float32)
            changes.append(tf.cast(variable, tf.float32) - base)
        sizes = [math.prod(change.shape) for change in changes]

        def update(mean: Any) -> None:
            parts = iter(tf.split(mean, sizes) if changes else ())
            starts = {id(layer): [tf.identity(value) for value in _statistics(layer)] for layer, *_ in norms}
            for layer, *moves in norms:
                _move_statistics(
                    layer, starts[id(layer)], *(tf.reshape(next(parts), move.shape) for move in moves)
                )
            for variable, part in zip(differing, parts, strict=True):
                change = tf.reshape(part, variable.shape)
                change = change if variable.dtype.is_floating else tf.round(change)
                variable.assign(self._bases[id(variable)] + tf.cast(change, variable.dtype))
                self._bases[id(variable)] = self._values.get(variable)

        return changes, update

    def _find_differing(self, trained: set[int]) -> list[Any]:
        """Return the tf.Variables that differ by rank now. Raises WorkerError if one has no mean.

        A change that does not depend on batch or random numbers, but for a sum over the ranks, is the same on
        every rank. An example is a moving average of the weights.
        """
        unknown = self._values.unknown
        self._bases = {key: inner for key, (_, inner) in unknown.items()} | self._bases
        left_out = trained | self._passing
        differing = [
            variable
            for variable in (*self._variables, *(variable for variable, _ in unknown.values()))
            if id(variable) not in left_out and self._is_of_rank(variable)
        ]
        for variable in differing:
            if not is_number(variable):
                raise JobError(
                    f"train_step writes {variable.name}, {variable.dtype.name}, from samples of its batch",
                    "only numbers can be averaged over ranks",
                )
        return differing

    def _is_of_rank(self, variable: Any) -> bool:
        """Return whether the value of a variable follows from a tensor that differs by rank."""
        tensor, seen = self._values.get(variable), set[str]()
        waiting = [] if tensor is self._bases[id(variable)] else [tensor.op]
        while waiting:
            operation = waiting.pop()
            if operation.name in self._of_rank:
                return True
            if operation.name not in seen:
                seen.add(operation.name)
                waiting += [tensor.op for tensor in operation.inputs]
        return False

    def _sum_gradients(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the mean gradients of all ranks' samples, with None where a variable has none."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise JobError(
                "train_step applies gradients inside of a condition, a loop or a function of TensorFlow",
                "use conditions and loops of Python, and remove @tf.function: the whole step is traced",
            )
        pairs = zip(variables, gradients, strict=True)
        given = [(variable, gradient) for variable, gradient in pairs if gradient is not None]
        self.applied.append((optimizer, variables))
        if not given:
            return gradients
        are_sums = {self._of_sums.pop(id(gradient), None) is not None for _, gradient in given}
        if len(are_sums) > 1:
            raise JobError(
                "train_step applies gradients of losses with a value for each sample and of means together",
                "take the mean of every loss: tf.reduce_mean(loss)",
            )
        is_summed = are_sums == {True}
        weight = self._of_sample if is_summed else self._weight
        # TensorFlow does not know the shape of every gradient, such as an embedding's.
        shaped = [tf.reshape(tf.convert_to_tensor(gradient), variable.shape) for variable, gradient in given]
        weighted = [tf.cast(gradient, tf.float32) * weight for gradient in shaped]
        total = self.sum_over_ranks(weighted, [])
        self.sums[-1] = replace(self.sums[-1], is_summed=is_summed)
        mean = total[self.sums[-1].layout.gradients] / (1 if is_summed else total[-1])
        means = zip(shaped, unflatten(mean, [variable for variable, _ in given]), strict=True)
        typed = iter([tf.cast(part, gradient.dtype) for gradient, part in means])
        return [None if gradient is None else next(typed) for gradient in gradients]


def _statistics(layer: Any) -> tuple[Any, Any]:
    return layer.moving_mean.value, layer.moving_variance.value


def _move_statistics(layer: Any, starts: Sequence[Any], moved: Any, spread: Any) -> None:
    """Move a batch norm's statistics from `starts` as one call with the pooled batch does."""
    rate = 1.0 - float(layer.momentum)
    mean, variance = _statistics(layer)
    moved, spread = tf.cast(moved, mean.dtype), tf.cast(spread, mean.dtype)
    pooled = starts[1] + (spread - moved * moved / rate) / rate
    variance.assign(tf.maximum(variance + rate * (pooled - variance), 0.0))
    mean.assign(mean + rate * (starts[0] + moved / rate - mean))


@contextmanager
def replacing_apply(change: Callable[[Any, list[Any], list[Any]], list[Any]]) -> Iterator[None]:
    """Let every optimizer apply what `change` returns of (optimizer, gradients, variables)."""
    is_applying = False

    def wrap(original: Any) -> Any:
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            nonlocal is_applying
            if is_applying:  # an optimizer that wraps another one
                return original(optimizer, grads, trainable_variables)
            variables = trainable_variables
            variables = internals.trained_variables(optimizer) if variables is None else list(variables)
            with tf.device(STATE):
                changed = change(optimizer, list(grads), variables)
                is_applying = True
                try:
                    return original(optimizer, changed, variables)
                finally:
                    is_applying = False

        return apply

    with ExitStack() as stack:
        for kind in internals.optimizer_classes():
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
def repeatable_draws(seed: Any) -> Iterator[None]:
    """Let tf.random draw numbers that follow from `seed`, shape (2,), int32, and the order of the calls."""
    graph = tf.compat.v1.get_default_graph()
    numbers = itertools.count(1)

    def next_seed() -> Any:
        if tf.compat.v1.get_default_graph() is not graph:
            raise JobError(
                "train_step draws from tf.random inside of a condition, a loop or a function of TensorFlow",
                "draw before it, for the whole batch",
            )
        return tf.random.experimental.stateless_fold_in(seed, next(numbers))

    def stateless(name: str, draw: Any) -> Any:
        signature = inspect.signature(getattr(tf.random, name))

        def call(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options).arguments | {"seed": None}
            arguments = {key: value for key, value in given.items() if value is not None}
            return draw(**arguments, seed=next_seed())

        return call

    kinds = ("normal", "truncated_normal", "uniform", "categorical")
    functions = {kind: stateless(kind, getattr(tf.random, f"stateless_{kind}")) for kind in kinds}
    functions["shuffle"] = stateless("shuffle", tf.random.experimental.stateless_shuffle)
    with mock.patch.multiple(tf.random, **functions):
        yield
