"""A model run over samples, without training: what each machine computes for features and for `predict`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.compute.keras_internals import topological_nodes
from csdctl.worker.compute.model import load
from csdctl.worker.compute.objective import as_tensors, inputs_of
from csdctl.worker.data.arrays import Array
from csdctl.worker.process.errors import InputError
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, ResultRule
from csdctl.worker.protocol.run_spec import HeadSpec, Prefix

BATCH_SIZE = 32
"""Samples of a forward pass. Always as many: a kernel may round differently for another number."""


@dataclass(frozen=True)
class BatchedPass:
    """A model that is run over samples in batches of `BATCH_SIZE`, the last one padded."""

    compute: Callable[[Array], list[Array]]
    """Returns the outputs of a batch, each of shape (BATCH_SIZE, …)."""
    convert: Callable[[list[Array]], Array]
    """Makes the stored rows of them."""

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
            raise InputError(
                "the model does not compute one row for each sample",
                "use a model whose outputs have one row for each sample of the batch",
            )
        return self.convert(outputs)[: len(samples)]


def forward_pass(part: Prefix, convert: Callable[[list[Array]], Array], layer: str = "") -> BatchedPass:
    """Return what runs a Keras model with one thread pool, that of the process.

    `convert` makes the stored rows of the model's outputs, or of the output of `layer`. Raises WorkerError if
    the model cannot be built here, or has no such layer.
    """
    model = load(Path(part.architecture), Path(part.weights), part.code)
    computed = keras.Model(model.inputs, output_of(model, layer)) if layer else model

    def forward(samples: Any) -> Any:
        outputs = computed(inputs_of(model, samples, part.input_range), training=False)
        return keras.tree.flatten(outputs)

    graph = tf.function(forward, autograph=False, reduce_retracing=True)
    return BatchedPass(lambda samples: list(map(np.asarray, graph(as_tensors(samples)))), convert)


def output_of(model: Any, layer: str) -> Any:
    """Return the tensor that the layer of this name computes; raises WorkerError if there is not one."""
    nodes = topological_nodes(model) if getattr(model, "inputs", None) else []
    for operation, node in reversed(nodes):
        if operation.name == layer and len(node.output_tensors) == 1:
            return node.output_tensors[0]
    raise InputError(
        f"the model's graph has no layer {layer} with one output", "name one of its layers with --layer"
    )


def to_results(outputs: Sequence[Array], rules: Sequence[ResultRule]) -> Array:
    """Return the records that are kept of a batch's outputs, each of shape (n, …)."""
    if len(outputs) != len(rules):
        raise InputError(
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


def feature_pass(prefix: Prefix) -> BatchedPass:
    """Return what computes features; raises WorkerError if the prefix cannot be built here."""
    return forward_pass(prefix, lambda outputs: outputs[0].astype(prefix.precision))


@functools.lru_cache(maxsize=1)  # to build it takes longer than to save it, and the best epochs do both
def _load_whole(spec: HeadSpec) -> Any:
    return load(Path(spec.architecture), Path(spec.weights), spec.prefix.code)


def assemble(spec: HeadSpec, head: Any) -> Any:
    """Return the whole model with the weights of `head`, and the state of its optimizer.

    It is the same object each time.
    """
    whole = _load_whole(spec)
    for place, variable in zip(spec.head_weights, head.weights, strict=True):
        whole.weights[place].assign(variable.value)
    whole.optimizer.build(whole.trainable_variables)
    for target, variable in zip(whole.optimizer.variables, head.optimizer.variables, strict=True):
        target.assign(variable.value)
    return whole
