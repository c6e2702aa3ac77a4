"""Metrics over ranks: a Keras metric is a state that batches add to, so states can be summed over ranks.

Mean, accuracy, AUC, precision, recall, confusion matrices: each keeps sums over samples, and computes its
result from them. The result from the sum of the ranks' states is that of one process on all samples.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array

LOSS = "loss"
MAX_RESULTS = 64
"""Values of one metric that are reported: more are left out, such as those of a thousand classes."""


class MetricStates:
    """The states of a compiled model's metrics, as one flat vector."""

    def __init__(self, metrics: Sequence[Any], of_batches: Sequence[Any], tf: Any) -> None:
        """`metrics`: built, without the tracker of the whole loss; `of_batches`: those that count batches."""
        self._tf = tf
        weighted = {id(variable) for metric in of_batches for variable in metric.variables}
        self._metrics = list(metrics)
        self._variables = [variable for metric in self._metrics for variable in metric.variables]
        self._is_of_batches = [id(variable) in weighted for variable in self._variables]
        self._initial = [np.asarray(variable.value).copy() for variable in self._variables]
        self.size = sum(int(initial.size) for initial in self._initial)

    def reset(self) -> None:
        """Set the initial state; inside a graph."""
        for variable, initial in zip(self._variables, self._initial, strict=True):
            variable.assign(initial)

    def read(self, count: Any) -> list[Any]:
        """Return what a batch of `count` samples added since `reset`, flat, float32; inside a graph."""
        tf = self._tf
        added = []
        for variable, initial, is_of_batches in zip(
            self._variables, self._initial, self._is_of_batches, strict=True
        ):
            change = tf.reshape(tf.cast(variable.value - initial, tf.float32), [-1])
            added.append(change * count if is_of_batches else change)
        return added

    def compute(self, state: Sequence[float]) -> dict[str, float]:
        """Return the results by name for a summed state, shape (size,)."""
        position = 0
        values = np.asarray(state, np.float64)
        for variable, initial in zip(self._variables, self._initial, strict=True):
            part = values[position : position + initial.size].reshape(initial.shape)
            variable.assign((initial + part).astype(initial.dtype))
            position += initial.size
        results: dict[str, float] = {}
        for metric in self._metrics:
            found = metric.result()
            named = found if isinstance(found, dict) else {metric.name: found}
            for name, value in named.items():
                results |= _flatten(name, np.asarray(value))
        return results


def _flatten(name: str, value: Array) -> dict[str, float]:
    if value.ndim == 0:
        return {name: float(value)}
    return {f"{name}_{number}": float(one) for number, one in enumerate(value.ravel()[:MAX_RESULTS])}
