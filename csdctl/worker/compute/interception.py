"""Interception of a user's train_step: what its optimizers apply is summed over the ranks before.

Each rank sends its gradients times its number of samples n, and the optimizer gets Σ n g / Σ n. A step has
one sum for each time that it applies gradients, in the order of the trace, and a last one:

    [ n · gradients | n · changes of state | n | stop | seconds ]
    [ n · changes of state | states of metrics | n · logs | n | stop | seconds ]
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from csdctl.worker.compute.backend import STATE, keras, tf
from csdctl.worker.compute.keras_internals import optimizer_classes
from csdctl.worker.compute.objective import noting_batches
from csdctl.worker.compute.statistics import pooled_spread
from csdctl.worker.compute.trace import unflatten
from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.layout import VectorLayout
from csdctl.worker.process.errors import InputError

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


class StepGraph:
    """The writes of one traced step, and which of them differ by rank.

    A variable differs by rank when what is written to it depends on the rank's batch or its random numbers by
    another way than through a sum over the ranks. A change that does not depend on them is the same on every
    rank, such as that of a moving average of the weights.
    """

    def __init__(self, graph: Any, own: Collection[int], sums: Collection[str] = ()) -> None:
        """`own`: the ids of the handles of variables that differ by rank before the step.

        `sums`: the names of the operations in which ranks sum.
        """
        from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

        inner = {id(placeholder): handle for handle, placeholder in graph.captures}
        # While a function is traced, its variables are only those that its tapes watch.
        accessed = list(graph.variables) or list(graph._watched_variables)
        variables = {id(variable.handle): variable for variable in accessed}
        differing = set(own)
        """Ids of handles."""
        tensors: set[int] = set()
        """Ids of the tensors that differ by rank."""
        written: dict[int, Any] = {}
        self.drawing: list[str] = []
        """Types of operations that draw random numbers which cannot be repeated."""
        for operation in graph.get_operations():
            if operation.type in DRAWING:
                self.drawing.append(operation.type)
            reads, writes = (
                {id(inner[id(tensor)]) for tensor in found if id(tensor) in inner}
                for found in get_read_write_resource_inputs(operation)
            )
            values = [tensor for tensor in operation.inputs if id(tensor) not in inner]
            is_assigning = operation.type == "AssignVariableOp"
            reads_state = bool((reads | (set() if is_assigning else writes)) & differing)
            is_different = reads_state or any(id(tensor) in tensors for tensor in values)
            if operation.name in sums:
                is_different = False
            elif operation.type == "Placeholder":  # of the batch, if it is not captured
                is_different = id(operation.outputs[0]) not in inner
            if is_different:
                tensors |= {id(tensor) for tensor in operation.outputs}
                differing |= writes
            elif is_assigning:
                differing -= writes
            for handle in writes:
                if handle in variables:
                    written.setdefault(handle, variables[handle])
        self.written = list(written.values())
        """The variables that the step writes, tf.Variables, in the order of their first write."""
        self.differing = [variable for handle, variable in written.items() if handle in differing]
        """Those whose new values differ by rank."""


class BatchStates:
    """The state that a step writes beside what its optimizers train, in one trace of the step.

    State that differs by rank is summed with the next sum: of the statistics of batch norm the pooled batch's
    are computed for each call, of all other state the mean of the changes.
    """

    def __init__(self, find_passing: Callable[[], list[Any]]) -> None:
        """`find_passing` returns the variables that every step sets anew."""
        self._find_passing = find_passing
        self.graph = tf.compat.v1.get_default_graph()
        """That of the step."""
        self.sums: set[str] = set()
        """The names of the operations in which ranks sum."""
        self.parts: list[tuple[str, int]] = []
        """The parts of the summed changes, in order: the layer's name, '' for others, and the size."""
        self.drawing: list[str] = []
        """Types of operations that draw random numbers which cannot be repeated."""
        self._norms: list[tuple[Any, Any, Any]] = []
        """The calls of batch norms since the last sum: layer, and moves of its statistics."""
        self._bases: dict[int, Any] = {}
        """The values after the last sum of state that differs by rank, by the id of the variable."""
        self._held: dict[int, tuple[Any, Any]] = {}
        """Variables, and those that hold their values before the step, by id."""

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
        differing = self._find_differing(trained)
        changes = [move for _, *moves in norms for move in moves]
        bases = [self._base_of(variable) for variable in differing]
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
                self._bases[id(variable)] = tf.identity(variable)

        return [change * weight for change in changes], update

    def hold(self) -> tuple[list[Any], Callable[[], None], Callable[[], None]]:
        """Return all that the step writes, and graphs that save it before a step and restore it."""
        passing = {id(one) for one in self._find_passing()}
        written = [one for one in StepGraph(self.graph, (), self.sums).written if id(one) not in passing]
        for variable in written:
            self._held_of(variable)
        pairs = list(self._held.values())
        return written, _assigning([pair[::-1] for pair in pairs]), _assigning(pairs)

    def _find_differing(self, trained: Iterable[Any]) -> list[Any]:
        """Return the variables that differ by rank now; raises WorkerError for those without a mean."""
        passing = self._find_passing()
        graph = StepGraph(self.graph, {id(one.handle) for one in passing}, self.sums)
        self.drawing = graph.drawing
        known = {id(one) for one in (*(variable.value for variable in trained), *passing)}
        found = [one for one in graph.differing if id(one) not in known]
        for variable in found:
            if not is_number(variable):
                raise InputError(
                    f"train_step writes {variable.name}, {variable.dtype.name}, from samples of its batch",
                    "only numbers can be averaged over ranks",
                )
        return found

    def _base_of(self, variable: Any) -> Any:
        """Return the value after the last sum, or before the step."""
        if id(variable) not in self._bases:
            self._bases[id(variable)] = tf.identity(self._held_of(variable))
        return self._bases[id(variable)]

    def _held_of(self, variable: Any) -> Any:
        """Return the variable that holds the value before the step."""
        if id(variable) not in self._held:
            held = run_eagerly(lambda: tf.Variable(variable, trainable=False))
            self._held[id(variable)] = variable, held
        return self._held[id(variable)][1]


def is_number(tensor: Any) -> bool:
    """Return whether a tensor or variable has numbers, which can be averaged."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer)


def run_eagerly(code: Callable[[], Any]) -> Any:
    """Return what `code` returns outside of the graph that is being traced: graphs belong to their thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(code).result()


def _assigning(pairs: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
    """Return a graph that assigns the second of each pair to the first."""

    def assign() -> None:
        for variable, value in pairs:
            variable.assign(value, read_value=False)

    graph: Callable[[], None] = tf.function(assign, autograph=False, input_signature=[])
    return graph


def _statistics(layer: Any) -> tuple[Any, Any]:
    return layer.moving_mean.value, layer.moving_variance.value


def _move_statistics(layer: Any, starts: Sequence[Any], moved: Any, spread: Any) -> None:
    """Move the statistics of a batch norm as one call with the pooled batch does; inside a graph.

    `starts`: the statistics that `moved` and `spread`, means over ranks, are relative to.
    """
    rate = 1.0 - float(layer.momentum)
    mean, variance = _statistics(layer)
    moved, spread = tf.cast(moved, mean.dtype), tf.cast(spread, mean.dtype)
    pooled = starts[1] + (spread - moved * moved / rate) / rate
    variance.assign(tf.maximum(variance + rate * (pooled - variance), 0.0))
    mean.assign(mean + rate * (starts[0] + moved / rate - mean))


Exchange = Callable[[int, Array], Array]
"""Sums a vector over the ranks, given the number of the sum within the step."""


class SumLayout(VectorLayout):
    """Where the parts of one summed vector of a step are: values, n, and what the training loop adds."""

    is_summed = False
    """Whether the gradients are those of a sum over the samples, not of a mean."""

    def __init__(self, name: str, num_gradients: int, num_states: int, num_others: int) -> None:
        """`name`: what is summed, for messages; `num_others`: elements of states of metrics, and logs."""
        super().__init__(num_gradients, num_states, num_others - 1)
        self.name, self.num_states, self.num_others = name, num_states, num_others


class Interception:
    """One trace of a step, and its sums."""

    def __init__(self, states: BatchStates, weight: Any, of_sample: float, exchange: Exchange) -> None:
        """`weight`: n times `of_sample`, a tensor; `exchange` is called by every step."""
        self._states, self._weight, self._exchange = states, weight, exchange
        self._of_sample = of_sample
        self._of_sums: dict[int, Any] = {}
        """Gradients of losses with a value for each sample, which TensorFlow adds, by their ids."""
        self.applied: list[tuple[Any, list[Any]]] = []
        """Optimizer and variables of each sum."""
        self.layouts: list[SumLayout] = []
        """The layouts of the sums, in their order."""
        self.of_batches: list[Any] = []
        """Metrics that a number was added to for the whole batch."""
        self.has_draws = False
        """Whether the step draws numbers by tf.random."""

    @contextmanager
    def active(self, seed: Any) -> Iterator[None]:
        """Sum gradients where optimizers apply them, and see to random numbers and statistics."""
        layers = keras.layers
        with (
            replacing_apply(self._sum_gradients),
            replacing(tf.GradientTape, "gradient", self._noting_sums),
            replacing(layers.BatchNormalization, "call", self._states.normalizing),
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
            found = original(tape, target, sources, *args, **options)
            of_variables = all(hasattr(one, "assign") for one in tf.nest.flatten(sources))
            targets = [one for one in tf.nest.flatten(target) if one is not None]
            if of_variables and any(one.shape.rank and one.shape.num_elements() != 1 for one in targets):
                self._of_sums |= {id(one): one for one in tf.nest.flatten(found) if one is not None}
            return found

        return gradient

    def sum(self, gradients: list[Any], others: list[Any], name: str) -> Any:
        """Sum over the ranks; return the total, and bring all state to that of the pooled batch."""
        weight, number = self._weight, len(self.layouts)
        trained: Iterable[Any] = ()
        if gradients:  # the last sum also has what the step itself has written to variables that it trains
            pairs = self.applied
            trained = (one for optimizer, variables in pairs for one in (*variables, *optimizer.variables))
        states, update = self._states.take(weight, trained)
        flat = [[tf.reshape(one, [-1]) for one in part] for part in (gradients, states, others)]
        layout = SumLayout(name, *(sum(int(one.shape[0]) for one in part) for part in flat))
        self.layouts.append(layout)
        own = tf.concat([*flat[0], *flat[1], *flat[2], tf.zeros([0])], axis=0)
        own = tf.where(weight > 0, own, tf.zeros_like(own))
        own = tf.concat([own, tf.reshape(weight, [1])], axis=0)
        total = self._exchange_in_graph(own, number)
        self._states.sums.add(total.op.name)
        total.set_shape(own.shape)
        with tf.device(STATE):
            update((total / total[-1])[layout.statistics])
        return total

    def _exchange_in_graph(self, own: Any, number: int) -> Any:
        return tf.numpy_function(
            lambda part: np.array(self._exchange(number, part), np.float32), [own], tf.float32, stateful=True
        )

    def _sum_gradients(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the mean gradients of all ranks' samples, with None where a variable has none."""
        self._check_graph()
        if not optimizer.built:
            run_eagerly(lambda: optimizer.build(variables))
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
        weight = self._of_sample if are_sums == {True} else self._weight
        # TensorFlow does not know the shape of every gradient, as of an embedding.
        shaped = [tf.reshape(one, variable.shape) for one, variable in zip(dense, trained, strict=True)]
        own = [tf.cast(one, tf.float32) * weight for one in shaped]
        total = self.sum(own, [], f"gradients of {len(trained)} variables for {optimizer.name}")
        layout = self.layouts[-1]
        layout.is_summed = are_sums == {True}
        gradient = total[layout.gradients] / (1 if layout.is_summed else total[-1])
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
def recording(totals: Sequence[Array], layouts: Sequence[SumLayout]) -> Iterator[list[Array]]:
    """Let optimizers apply the gradients of `totals`, the sums of a step; yield those that they are given.

    It is what ranks are judged by, and works eagerly, without the graph of a step.
    """
    recorded: list[Array] = []

    def record(_: Any, gradients: list[Any], __: Any) -> list[Any]:
        total, layout = totals[len(recorded)], layouts[len(recorded)]
        own = [np.asarray(tf.convert_to_tensor(one), np.float64) for one in gradients if one is not None]
        recorded.append(np.concatenate([one.ravel() for one in own] or [np.zeros(0)]))
        mean = total[layout.gradients] / (1 if layout.is_summed else total[-1])
        means = np.split(mean, np.cumsum([one.size for one in own]))
        shaped = iter(part.reshape(one.shape) for part, one in zip(means, own, strict=False))
        return [None if one is None else tf.cast(next(shaped), one.dtype) for one in gradients]

    with replacing_apply(record):
        yield recorded


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
