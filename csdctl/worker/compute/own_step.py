"""Compiles a user's own train_step: functions without state, cut at its sums.

The step is traced as custom_step.py traces it, but with the variables as arguments (trace.py), and with a
placeholder in place of each sum over the ranks. A rank runs it in parts: up to what it gives to the first
sum, from there to the second, and after the last one to the new state.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.compute.interception import Interception, is_number, replacing
from csdctl.worker.compute.statistics import pooled_spread
from csdctl.worker.process.errors import InputError

OWN = "own"


class ScopeStates:
    """The state that a step writes beside what its optimizers train, as BatchStates, of values in a scope."""

    def __init__(self, variables: Sequence[Any], of_rank: Iterable[Any]) -> None:
        """`variables`: of the state, Keras'; `of_rank`: the tensors that differ by rank."""
        self.graph = tf.compat.v1.get_default_graph()
        self.sums: set[str] = set()
        self.parts: list[tuple[str, int]] = []
        self._variables = variables
        self._of_rank = {one.op.name for one in of_rank}
        self._norms: list[tuple[Any, Any, Any]] = []
        self._bases = {id(one): one.value for one in variables}

    def normalizing(self, original: Any) -> Any:
        """Return what takes the place of the call of batch norms."""

        def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            rate = 1.0 - float(layer.momentum)
            is_moving = training and layer.trainable and rate > 0 and not getattr(layer, "renorm", False)
            if not is_moving or tf.compat.v1.get_default_graph() is not self.graph:
                return original(layer, inputs, training=training, mask=mask)
            mean, variance = layer.moving_mean, layer.moving_variance
            old = mean.value, variance.value
            outputs = original(layer, inputs, training=training, mask=mask)
            self._norms.append((layer, *pooled_spread(mean.value - old[0], variance.value - old[1], rate)))
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
        bases = [self._bases[id(one)] for one in differing]
        changes = [move for _, *moves in norms for move in moves]
        changes += [
            tf.cast(one.value, tf.float32) - tf.cast(base, tf.float32)
            for one, base in zip(differing, bases, strict=True)
        ]
        self.parts += [(layer.name, 2 * math.prod(moved.shape)) for layer, moved, _ in norms]
        self.parts += [("", math.prod(one.shape)) for one in differing]

        def update(mean: Any) -> None:
            parts = iter(tf.split(mean, [math.prod(one.shape) for one in changes]) if changes else ())
            starts = {
                id(layer): (layer.moving_mean.value, layer.moving_variance.value) for layer, *_ in norms
            }
            for layer, *moves in norms:
                moved, spread = (tf.reshape(next(parts), move.shape) for move in moves)
                _move_statistics(layer, starts[id(layer)], moved, spread)
            for variable, base in zip(differing, bases, strict=True):
                change = tf.reshape(next(parts), variable.shape)
                change = change if "float" in variable.dtype else tf.round(change)
                variable.assign(base + tf.cast(change, base.dtype))
                self._bases[id(variable)] = variable.value

        return [change * weight for change in changes], update

    def _find_differing(self, trained: Iterable[Any]) -> list[Any]:
        """Return the variables that differ by rank now; raises InputError for those without a mean."""
        known = {id(one) for one in trained}
        changed = [
            one for one in self._variables if id(one) not in known and one.value is not self._bases[id(one)]
        ]
        found = [one for one in changed if self._is_of_rank(one.value)]
        for variable in found:
            if not is_number(variable.value):
                raise InputError(
                    f"train_step writes {variable.path}, {variable.dtype}, from samples of its batch",
                    "only numbers can be averaged over ranks",
                )
        return found

    def _is_of_rank(self, tensor: Any) -> bool:
        """Return whether a tensor depends on the rank by another way than through a sum over the ranks."""
        waiting, seen = [tensor.op], set()
        while waiting:
            operation = waiting.pop()
            if operation.name in self._of_rank:
                return True
            if operation.name not in seen and operation.name not in self.sums:
                seen.add(operation.name)
                waiting += [one.op for one in operation.inputs]
        return False


def _move_statistics(layer: Any, starts: Sequence[Any], moved: Any, spread: Any) -> None:
    """Move the statistics of a batch norm as one call with the pooled batch does.

    `starts`: the statistics that `moved` and `spread`, means over ranks, are relative to.
    """
    rate = 1.0 - float(layer.momentum)
    mean, variance = layer.moving_mean, layer.moving_variance
    moved, spread = tf.cast(moved, mean.dtype), tf.cast(spread, mean.dtype)
    pooled = starts[1] + (spread - moved * moved / rate) / rate
    variance.assign(tf.maximum(variance.value + rate * (pooled - variance.value), 0.0))
    mean.assign(mean.value + rate * (starts[0] + moved / rate - mean.value))


class ScopeInterception(Interception):
    """An Interception whose sums are placeholders, and whose variables are those of a scope."""

    def __init__(self, states: ScopeStates, weight: Any, of_sample: Any) -> None:
        super().__init__(states, weight, of_sample, lambda number, part: part)  # type: ignore[arg-type]
        self.own: list[Any] = []
        """What this rank gives to each sum."""

    def _exchange_in_graph(self, own: Any, number: int) -> Any:
        self.own.append(own)
        return tf.compat.v1.placeholder(tf.float32, own.shape, name=f"total_{number}")


@contextmanager
def watching(variables: Sequence[Any]) -> Iterator[None]:
    """Let gradient tapes take Keras' variables for their values in the scope."""
    values: dict[int, dict[int, Any]] = {}

    def value_of(tape: Any, one: Any) -> Any:
        known = values.get(id(tape), {})
        return known.get(id(one), getattr(one, "value", one)) if isinstance(one, keras.Variable) else one

    def enter(original: Any) -> Any:
        def call(tape: Any) -> Any:
            entered = original(tape)
            values[id(tape)] = {id(one): one.value for one in variables}
            if tape._watch_accessed_variables:
                floats = [one for one in variables if one.trainable and "float" in one.dtype]
                entered.watch([values[id(tape)][id(one)] for one in floats])
            return entered

        return call

    def gradient(original: Any) -> Any:
        def call(tape: Any, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
            return original(tape, target, _map(lambda one: value_of(tape, one), sources), *args, **options)

        return call

    def watch(original: Any) -> Any:
        def call(tape: Any, tensor: Any) -> Any:
            return original(tape, _map(lambda one: value_of(tape, one), tensor))

        return call

    with ExitStack() as stack:
        for name, wrap in (("__enter__", enter), ("gradient", gradient), ("watch", watch)):
            stack.enter_context(replacing(tf.GradientTape, name, wrap))
        yield


def _map(function: Callable[[Any], Any], structure: Any) -> Any:
    return tf.nest.map_structure(function, structure)
