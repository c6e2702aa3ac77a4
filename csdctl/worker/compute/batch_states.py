"""State that a user's train_step writes beside what its optimizers train, in one trace of the step.

State that differs by rank (step_graph.py) is summed with the next sum: of the statistics of batch norm the
pooled batch's are computed for each call, of all other state the mean of the changes. What train_step assigns
from weights alone, such as a moving average of them, every rank computes alike.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from csdctl.worker.compute.statistics import pooled_spread
from csdctl.worker.compute.step_graph import StepGraph
from csdctl.worker.process.errors import InputError


class BatchStates:
    """The state that a step writes, and the changes that differ by rank."""

    def __init__(self, find_passing: Callable[[], list[Any]], tf: Any) -> None:
        """`find_passing` returns the variables that every step sets anew."""
        self._find_passing, self._tf = find_passing, tf
        self.graph = tf.compat.v1.get_default_graph()
        """That of the step."""
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
        tf = self._tf

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

        `trained`: the variables that optimizers write.
        """
        tf = self._tf
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
                _move_statistics(layer, starts[id(layer)], moved, spread, tf)
            for variable, base in zip(differing, bases, strict=True):
                change = tf.reshape(next(parts), variable.shape)
                change = change if variable.dtype.is_floating else tf.round(change)
                variable.assign(base + tf.cast(change, variable.dtype))
                self._bases[id(variable)] = tf.identity(variable)

        return [change * weight for change in changes], update

    def hold(self) -> tuple[list[Any], Callable[[], None], Callable[[], None]]:
        """Return all that the step writes, and graphs that save it before a step and restore it."""
        passing = {id(one) for one in self._find_passing()}
        written = [one for one in StepGraph(self.graph, ()).written if id(one) not in passing]
        for variable in written:
            self._held_of(variable)
        pairs = list(self._held.values())
        return written, _assigning([pair[::-1] for pair in pairs], self._tf), _assigning(pairs, self._tf)

    def _find_differing(self, trained: Iterable[Any]) -> list[Any]:
        """Return the variables that differ by rank now; raises WorkerError for those without a mean."""
        passing = self._find_passing()
        graph = StepGraph(self.graph, {id(one.handle) for one in passing})
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
            self._bases[id(variable)] = self._tf.identity(self._held_of(variable))
        return self._bases[id(variable)]

    def _held_of(self, variable: Any) -> Any:
        """Return the variable that holds the value before the step."""
        if id(variable) not in self._held:
            held = run_eagerly(lambda: self._tf.Variable(variable, trainable=False))
            self._held[id(variable)] = variable, held
        return self._held[id(variable)][1]


def is_number(tensor: Any) -> bool:
    """Return whether a tensor or variable has numbers, which can be averaged."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_integer)


def run_eagerly(code: Callable[[], Any]) -> Any:
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
