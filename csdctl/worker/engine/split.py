"""A model cut in two: each rank computes the prefix of its samples, rank 0 the head of all ranks' samples.

Forward and backward pass go through the cut: a rank sends the prefix's output for a micro-batch and gets back
the gradient of the loss with respect to it (deep partitioned training). Gradients are summed as for whole
models: a rank's vector has the gradient of the prefix, and rank 0 keeps the gradient of the head. Together
they are the gradient that ranks with whole models would sum, of the same micro-batches.
"""

import math
from collections.abc import Sequence

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.layout import Sums
from csdctl.worker.engine.step import BACKWARD, HEAD, JOIN, PREFIX, StepEngine
from csdctl.worker.engine.tensorflow_c import BFLOAT16, Tensors

MIN_MICRO_BATCH = 8
"""Samples of a micro-batch, if a batch has as many: in fewer, the cost of the weights dominates the head."""


def micro_batch_sizes(num_samples: int, num_parts: int, limit: int | None = None) -> list[int]:
    """Return the sizes of the micro-batches of a batch: at most `num_parts`, or more if `limit` asks for it.

    All but the last are of one size, so that a whole model with this micro-batch size computes the same.
    """
    if not num_samples:
        return []
    size = micro_batch_size(num_samples, num_parts, limit)
    return [min(size, num_samples - start) for start in range(0, num_samples, size)]


def micro_batch_size(num_samples: int, num_parts: int, limit: int | None = None) -> int:
    """Return the size of all micro-batches but the last."""
    return min(max(MIN_MICRO_BATCH, math.ceil(num_samples / num_parts)), limit or num_samples)


class PrefixStep:
    """The prefix on one rank: its part of the vector, and its optimizer step."""

    def __init__(self, engine: StepEngine, *, weight: float = 1.0) -> None:
        """`engine`: of the prefix, or on rank 0 of the whole model, with `StepInfo.split`.

        `weight` is the weight of each of the rank's samples in the mean of all ranks.
        """
        assert engine.info.split
        self.engine, self.split = engine, engine.info.split
        self._weight = np.array(weight, np.float32)
        self.layout = self.split.layout
        """The layout of the rank's vector, without what a training loop appends."""
        self.layouts = [self.layout]
        is_bfloat16 = self.split.dtype == "bfloat16"
        self.activation_type = BFLOAT16 if is_bfloat16 else np.dtype(self.split.dtype)
        self._passes: list[tuple[Array, Array, Tensors]] = []
        self._places: Sequence[int] = range(len(engine.info.variables))

    @property
    def values(self) -> Sequence[Array]:
        """The values of the variables that all ranks have: weights of the prefix, then their optimizer's."""
        values = self.engine.values
        return [values[place] for place in self._places]

    @values.setter
    def values(self, values: Sequence[Array]) -> None:
        self.engine.values = values

    @property
    def weights(self) -> list[Array]:
        """The weights of the prefix."""
        values, count = self.engine.values, self.engine.info.num_weights
        return [values[place] for place in self._places if place < count]

    def forward(self, samples: Array, number: int = 0) -> Array:
        """Return the prefix's output for micro-batch `number` of the step, whose backward pass is to come."""
        seeds = self.engine.seeds(number)
        results = self.engine.call(PREFIX, seeds, samples)
        self._passes.append((seeds, samples, results.tail(1)))
        return results.array(0)

    def backward(self, gradient: Array, loss_count: float, out: Array) -> None:
        """Add the vector of the earliest micro-batch to `out`, shape (layout.step_size,), float32.

        `gradient`: of its loss, times `loss_count`, the number that Keras divides it by, with respect to the
        prefix's output.
        """
        seeds, samples, kept = self._passes.pop(0)
        arguments = seeds, samples, gradient, np.array(loss_count, np.float32), self._weight, kept
        out += self.engine.call(BACKWARD, *arguments).array(0)

    def forget(self) -> None:
        """Drop forward passes whose backward pass does not come."""
        self._passes = []

    def apply(self, total: Array) -> Sums:
        """See StepEngine."""
        return self.engine.apply(total)


class SplitStep(PrefixStep):
    """Prefix and head on rank 0, which takes the step of the whole model."""

    def __init__(self, engine: StepEngine, *, weight: float = 1.0) -> None:
        super().__init__(engine, weight=weight)
        self._places = self.split.state
        self._sums: Tensors
        self.begin()

    def begin(self) -> None:
        """Begin a step: nothing is summed yet."""
        self._sums = self.engine.session.tensors(
            [np.zeros(shape, np.float32) for shape in self.split.head_shapes]
        )

    def head(
        self, outputs: Array, labels: Array, weight: float, rank: int, number: int
    ) -> tuple[Array, float]:
        """Add the vector of a rank's micro-batch to the sums of the head.

        Returns the gradient of its loss with respect to the prefix's `outputs`, times the number that Keras
        divides it by, and that number. `weight`: of each of its samples.
        """
        seeds = self.engine.seeds(number, rank)
        arguments = seeds, np.array(weight, np.float32), outputs, labels, self._sums
        results = self.engine.call(HEAD, *arguments)
        towards, loss_count = results.array(0), float(results.array(1))
        self._sums = results.tail(2)
        return towards, loss_count

    def add_sums_to(self, out: Array) -> None:
        """Add loss, metrics and the count of the loss of all ranks' samples to rank 0's vector."""
        layout = self.layout
        sums = self._sums.array(len(self._sums) - 1)
        out[layout.sums.start : layout.count] += sums[self.split.num_head_statistics : -1]

    def vector(self, total: Array) -> Array:
        """Return the vector of the whole model, shape (engine.layout.step_size,), that a sum amounts to."""
        return self.engine.call(JOIN, total, self._sums).array(0)

    def apply(self, total: Array) -> Sums:
        """See StepEngine. Take the step of the whole model."""
        return self.engine.apply(self.vector(total))
