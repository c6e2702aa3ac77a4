"""A model run over samples, without training: what each machine computes for features and for `predict`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, ResultRule

FORWARD = "forward"
"""The function of a graph, from the state and the fields of a batch to the outputs, in float32."""
BATCH_SIZE = 32
"""Samples of a forward pass, always the same number: a kernel may round differently for another number."""

Compute = Callable[[Array], list[Array]]
"""Returns the outputs of a batch, each of shape (BATCH_SIZE, …)."""


@dataclass(frozen=True)
class BatchedPass:
    """A model that is run over samples in batches of `BATCH_SIZE`, the last one padded."""

    compute: Compute
    convert: Callable[[list[Array]], Array]
    """Makes the stored rows of the outputs."""

    def run(self, samples: Array) -> Array:
        """Return a row, shape (n, …), for each of `samples`, shape (n, …)."""
        starts = range(0, len(samples), BATCH_SIZE)
        parts = [self._run_batch(samples[start : start + BATCH_SIZE]) for start in starts]
        return np.concatenate(parts) if parts else self._run_batch(samples)

    def _run_batch(self, samples: Array) -> Array:
        padded = np.zeros((BATCH_SIZE, *samples.shape[1:]), samples.dtype)
        padded[: len(samples)] = samples
        outputs = self.compute(padded)
        if any(output.shape[:1] != (BATCH_SIZE,) for output in outputs):
            raise JobError(
                "the model does not compute one row for each sample",
                "use a model whose outputs have one row for each sample of the batch",
            )
        return self.convert(outputs)[: len(samples)]


def to_results(outputs: Sequence[Array], rules: Sequence[ResultRule]) -> Array:
    """Return the records that are kept of a batch's outputs, each of shape (n, …)."""
    if len(outputs) != len(rules):
        raise JobError(
            f"the model has {len(outputs)} outputs, expected {len(rules)}",
            "use a model whose outputs are known before it is called",
        )
    fields = [
        field
        for output, rule in zip(outputs, rules, strict=True)
        for field in zip(rule.fields, _reduce(output, rule), strict=True)
    ]
    records = np.empty(len(outputs[0]), [(name, array.dtype, array.shape[1:]) for name, array in fields])
    for name, array in fields:
        records[name] = array
    return records


def _reduce(output: Array, rule: ResultRule) -> list[Array]:
    """Return what is kept of one output, shape (n, …): class and probability, or all values."""
    output = output.astype(np.float32)
    if rule.kind not in (SOFTMAX, SIGMOID):
        return [output]
    values = output.reshape(len(output), -1)
    if rule.from_logits and rule.kind == SOFTMAX:
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        values = powers / powers.sum(axis=1, keepdims=True)
    elif rule.from_logits:
        values = 0.5 * (1 + np.tanh(values / 2))
    if values.shape[1] == 1:  # the probability of the second of two classes
        values = np.concatenate([1 - values, values], axis=1)
    classes = values.argmax(axis=1)
    return [classes.astype(np.int32), values[np.arange(len(values)), classes].astype(np.float32)]
