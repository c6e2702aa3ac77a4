"""A model run over samples, without training: what each machine computes for features and for `predict`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.keras_internals import topological_nodes
from csdctl.worker.compute.model import load
from csdctl.worker.compute.objective import as_tensors, inputs_of
from csdctl.worker.data.arrays import Array
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, ResultRule
from csdctl.worker.protocol.run_spec import Prefix

BATCH_SIZE = 32
"""Samples of a forward pass. Always as many: a kernel may round differently for another number."""


class BatchedPass:
    """Runs a model over samples in batches of one size, the last one padded."""

    def __init__(self, convert: Callable[[list[Array]], Array]) -> None:
        """`convert` makes the stored rows of a batch's outputs."""
        self._convert = convert

    def compute(self, samples: Array) -> list[Array]:
        """Return the outputs of one batch, each of shape (BATCH_SIZE, …)."""
        raise NotImplementedError

    def run(self, samples: Array) -> Array:
        """Return a row, shape (n, …), for each of `samples`, shape (n, …)."""
        parts = [
            self._run_batch(samples[start : start + BATCH_SIZE])
            for start in range(0, len(samples), BATCH_SIZE)
        ]
        return np.concatenate(parts) if parts else self._run_batch(samples)

    def _run_batch(self, samples: Array) -> Array:
        padded = np.zeros((BATCH_SIZE, *samples.shape[1:]), samples.dtype)
        padded[: len(samples)] = samples
        outputs = self.compute(padded)
        if any(output.shape[:1] != (BATCH_SIZE,) for output in outputs):
            raise WorkerError(
                "the model does not compute one row for each sample",
                remedy="use a model whose outputs have one row for each sample of the batch",
                exit_code=2,
            )
        return self._convert(outputs)[: len(samples)]


class ForwardPass(BatchedPass):
    """Runs a Keras model over samples with one thread pool, that of the process."""

    def __init__(
        self, part: Prefix, convert: Callable[[list[Array]], Array], tf: Any, keras: Any, layer: str = ""
    ) -> None:
        """`convert` makes the stored rows of the model's outputs, or of the output of `layer`.

        Raises WorkerError if the model cannot be built here, or has no such layer.
        """
        super().__init__(convert)
        model = load(Path(part.architecture), Path(part.weights), keras, part.code)
        computed = keras.Model(model.inputs, output_of(model, layer)) if layer else model

        def forward(samples: Any) -> Any:
            outputs = computed(inputs_of(model, samples, part.input_range, tf, keras), training=False)
            return keras.tree.flatten(outputs)

        self._forward = tf.function(forward, autograph=False, reduce_retracing=True)
        self._tf = tf

    def compute(self, samples: Array) -> list[Array]:
        """Return the outputs of one batch, each of shape (BATCH_SIZE, …)."""
        return [np.asarray(output) for output in self._forward(as_tensors(samples, self._tf))]


def output_of(model: Any, layer: str) -> Any:
    """Return the tensor that the layer of this name computes; raises WorkerError if there is not one."""
    nodes = topological_nodes(model) if getattr(model, "inputs", None) else []
    for operation, node in reversed(nodes):
        if operation.name == layer and len(node.output_tensors) == 1:
            return node.output_tensors[0]
    raise WorkerError(
        f"the model's graph has no layer {layer} with one output",
        remedy="name one of its layers with --layer",
        exit_code=2,
    )


def to_results(outputs: Sequence[Array], rules: Sequence[ResultRule]) -> Array:
    """Return the records that are kept of a batch's outputs, each of shape (n, …)."""
    if len(outputs) != len(rules):
        raise WorkerError(
            f"the model has {len(outputs)} outputs, expected {len(rules)}",
            remedy="use a model whose outputs are known before it is called",
            exit_code=2,
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
    if rule.from_logits:
        values = _softmax(values) if rule.kind == SOFTMAX else 0.5 * (1 + np.tanh(values / 2))
    if values.shape[1] == 1:  # the probability of the second of two classes
        values = np.concatenate([1 - values, values], axis=1)
    classes = values.argmax(axis=1)
    return [classes.astype(np.int32), values[np.arange(len(values)), classes].astype(np.float32)]


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    found: Array = powers / powers.sum(axis=1, keepdims=True)
    return found
