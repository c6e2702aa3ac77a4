"""Interception of a user's train_step: what its optimizers apply is summed over the ranks before.

Each rank sends its gradients times its number of samples n, and the optimizer gets Σ n g / Σ n. A step has
one sum for each time that it applies gradients, in the order of the trace, and a last one:

    [ n · gradients | n · changes of state | n | stop | seconds ]
    [ n · changes of state | states of metrics | n · logs | n | stop | seconds ]
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from csdctl.worker.compute.batch_states import BatchStates, run_eagerly
from csdctl.worker.compute.keras_internals import optimizer_classes
from csdctl.worker.compute.step import size_of, unflatten
from csdctl.worker.data.arrays import Array
from csdctl.worker.process.errors import InputError

Exchange = Callable[[int, Array], Array]
"""Sums a vector over the ranks, given the number of the sum within the step."""


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
    def gradients(self) -> slice:
        """The gradients times n."""
        return slice(0, self.num_gradients)

    @property
    def statistics(self) -> slice:
        """The changes of state times n."""
        return slice(self.num_gradients, self.num_gradients + self.num_states)

    @property
    def count(self) -> int:
        """The index of n, the number of samples."""
        return self.num_gradients + self.num_states + self.num_others

    @property
    def step_size(self) -> int:
        """Elements of the step's part."""
        return self.count + 1

    @property
    def step(self) -> slice:
        """The step's part."""
        return slice(0, self.step_size)

    @property
    def stop(self) -> int:
        """The index of the stop request; after it, each rank's compute seconds, above 0 in the last sum."""
        return self.step_size


class Interception:
    """One trace of a step, and its sums."""

    def __init__(self, states: BatchStates, weight: Any, exchange: Exchange, tf: Any, keras: Any) -> None:
        """`weight`: n, a tensor; `exchange` is called by every step."""
        self._states, self._weight, self._exchange = states, weight, exchange
        self._tf, self._keras = tf, keras
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
        layers, metrics = self._keras.layers, self._keras.metrics
        with (
            replacing_apply(self._keras, self._sum_gradients),
            replacing(layers.BatchNormalization, "call", self._states.normalizing),
            replacing(metrics.Mean, "update_state", noting_batches(self.of_batches)),
            repeatable_draws(self._tf, seed) as drawn,
        ):
            yield
        self.has_draws = bool(drawn)

    def sum(self, gradients: list[Any], others: list[Any], name: str) -> Any:
        """Sum over the ranks; return the total, and bring all state to that of the pooled batch."""
        tf, weight, number = self._tf, self._weight, len(self.layouts)
        trained = (one for optimizer, variables in self.applied for one in (*variables, *optimizer.variables))
        states, update = self._states.take(weight, trained)
        flat = [[tf.reshape(one, [-1]) for one in part] for part in (gradients, states, others)]
        layout = SumLayout(name, *(sum(int(one.shape[0]) for one in part) for part in flat))
        self.layouts.append(layout)
        own = tf.concat([*flat[0], *flat[1], *flat[2], tf.zeros([0])], axis=0)
        own = tf.where(weight > 0, own, tf.zeros_like(own))
        own = tf.concat([own, tf.reshape(weight, [1])], axis=0)
        total = tf.numpy_function(
            lambda part: np.array(self._exchange(number, part), np.float32), [own], tf.float32, stateful=True
        )
        total.set_shape(own.shape)
        update((total / total[-1])[layout.statistics])
        return total

    def _sum_gradients(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the mean gradients of all ranks' samples, with None where a variable has none."""
        tf = self._tf
        self._check_graph()
        if not optimizer.built:
            run_eagerly(lambda: optimizer.build(variables))
        dense = [tf.convert_to_tensor(one) for one in gradients if one is not None]
        trained = [one for one, gradient in zip(variables, gradients, strict=True) if gradient is not None]
        self.applied.append((optimizer, variables))
        if not dense:
            return gradients
        # TensorFlow does not know the shape of every gradient, as of an embedding.
        shaped = [tf.reshape(one, variable.shape) for one, variable in zip(dense, trained, strict=True)]
        own = [tf.cast(one, tf.float32) * self._weight for one in shaped]
        total = self.sum(own, [], f"gradients of {len(trained)} variables for {optimizer.name}")
        means = iter(unflatten(total[: size_of(trained)] / total[-1], trained, tf))
        types = iter(one.dtype for one in dense)
        return [None if one is None else tf.cast(next(means), next(types)) for one in gradients]

    def _check_graph(self) -> None:
        """Raise WorkerError inside of a condition or a loop, which ranks may run through differently."""
        graph = self._tf.compat.v1.get_default_graph()
        while graph is not self._states.graph:
            if type(graph).__name__.startswith(("Cond", "While")):
                raise InputError(
                    "train_step applies gradients inside of a condition or a loop of TensorFlow",
                    "use a condition or a loop of Python, which is the same on all ranks",
                )
            graph = graph.outer_graph


@contextmanager
def recording(
    totals: Sequence[Array], layouts: Sequence[SumLayout], tf: Any, keras: Any
) -> Iterator[list[Array]]:
    """Let optimizers apply the gradients of `totals`, the sums of a step; yield those that they are given.

    It is what ranks are judged by, and works eagerly, without the graph of a step.
    """
    recorded: list[Array] = []

    def record(_: Any, gradients: list[Any], __: Any) -> list[Any]:
        total, layout = totals[len(recorded)], layouts[len(recorded)]
        own = [np.asarray(tf.convert_to_tensor(one), np.float64) for one in gradients if one is not None]
        recorded.append(np.concatenate([one.ravel() for one in own] or [np.zeros(0)]))
        means = np.split(total[layout.gradients] / total[-1], np.cumsum([one.size for one in own]))
        shaped = iter(part.reshape(one.shape) for part, one in zip(means, own, strict=False))
        return [None if one is None else tf.cast(next(shaped), one.dtype) for one in gradients]

    with replacing_apply(keras, record):
        yield recorded


@contextmanager
def replacing_apply(keras: Any, change: Callable[[Any, list[Any], list[Any]], list[Any]]) -> Iterator[None]:
    """Let every optimizer apply what `change` returns of (optimizer, gradients, variables)."""
    is_applying = False

    def wrap(original: Any) -> Any:
        def apply(optimizer: Any, gradients: Any, trainable_variables: Any = None) -> Any:
            nonlocal is_applying
            if is_applying:  # an optimizer that wraps another one
                return original(optimizer, gradients, trainable_variables)
            variables = trainable_variables
            variables = optimizer._trainable_variables if variables is None else list(variables)
            changed = change(optimizer, list(gradients), variables)
            is_applying = True
            try:
                return original(optimizer, changed, variables)
            finally:
                is_applying = False

        return apply

    with ExitStack() as stack:
        for kind in optimizer_classes(keras):
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


def noting_batches(found: list[Any]) -> Callable[[Any], Any]:
    """Return what takes the place of update_state, and adds to `found` the metrics of whole batches."""

    def wrap(original: Any) -> Any:
        def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
            is_number = sample_weight is None and len(getattr(values, "shape", ())) == 0
            if is_number and not any(metric is one for one in found):
                found.append(metric)
            return original(metric, values, sample_weight=sample_weight)

        return update_state

    return wrap


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
