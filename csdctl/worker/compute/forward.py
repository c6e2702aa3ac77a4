"""A model run over samples, without training: what each machine computes for features and for `predict`.

Features are computed by Keras or by LiteRT, which gives the same numbers but for rounding, starts in a
quarter of a second and takes 70 MB. The host converts the part, where TensorFlow is; the machine that runs it
needs the package ai-edge-litert alone.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import keras, load_backend, tf
from csdctl.worker.compute.keras_internals import topological_nodes
from csdctl.worker.compute.model import load
from csdctl.worker.compute.objective import as_tensors, inputs_of
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.process.errors import InputError, describe
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, ConvertSpec, ResultRule
from csdctl.worker.protocol.run_spec import HeadSpec, Prefix

BATCH_SIZE = 32
"""Samples of a forward pass. Always as many: a kernel may round differently for another number."""


@dataclass(frozen=True)
class BatchedPass:
    """A model that is run over samples in batches of one size, the last one padded."""

    compute: Callable[[Array], list[Array]]
    """Returns the outputs of a batch, each of shape (batch_size, …)."""
    convert: Callable[[list[Array]], Array]
    """Makes the stored rows of them."""
    batch_size: int = BATCH_SIZE

    def run(self, samples: Array) -> Array:
        """Return a row, shape (n, …), for each of `samples`, shape (n, …)."""
        size = self.batch_size
        parts = [self._run_batch(samples[start : start + size]) for start in range(0, len(samples), size)]
        return np.concatenate(parts) if parts else self._run_batch(samples)

    def _run_batch(self, samples: Array) -> Array:
        padded = np.zeros((self.batch_size, *samples.shape[1:]), samples.dtype)
        padded[: len(samples)] = samples
        outputs = self.compute(padded)
        if any(output.shape[:1] != (self.batch_size,) for output in outputs):
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


PACKAGE = "ai-edge-litert"
LITE_BATCH_SIZE = 8
"""Samples that LiteRT computes at a time: as fast as 32 for EfficientNet-Lite0 at 96×96, in 30 MB less."""


def lite_pass(part: Prefix, convert: Callable[[list[Array]], Array], threads: int) -> BatchedPass:
    """Return what runs the LiteRT model of `part`.

    Raises WorkerError if LiteRT is missing here, or cannot run the model.
    """
    check_stored(part.lite)
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise InputError(
            f"has no LiteRT: {describe(error)}",
            f"install the package {PACKAGE} there, or use --feature-engine keras",
        ) from None
    try:
        interpreter = Interpreter(model_path=part.lite, num_threads=threads)
        (source,) = interpreter.get_input_details()
        shape = [LITE_BATCH_SIZE, *source["shape"][1:].tolist()]
        interpreter.resize_tensor_input(source["index"], shape, strict=True)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"LiteRT cannot run the model: {describe(error)}", "use --feature-engine keras"
        ) from None
    outputs = interpreter.get_output_details()

    def compute(samples: Array) -> list[Array]:
        interpreter.set_tensor(source["index"], scale(samples, part.input_range, source["dtype"]))
        interpreter.invoke()
        return [interpreter.get_tensor(output["index"]) for output in outputs]

    return BatchedPass(compute, convert, LITE_BATCH_SIZE)


def scale(values: Array, input_range: tuple[float, float] | None, dtype: Any) -> Array:
    """Return values as the model's input, as objective.py's `scale` does with tensors."""
    if values.dtype == np.uint8 and input_range is not None:
        low, high = input_range
        return values.astype(np.float32) * np.float32((high - low) / 255.0) + np.float32(low)
    return values.astype(dtype)


def convert(spec: ConvertSpec) -> None:
    """Write a part of a model as a LiteRT model in float32.

    Raises WorkerError, exit code 2, for a model that has operations which LiteRT does not have.
    """
    load_backend()
    part = spec.part
    model = load(Path(part.architecture), Path(part.weights), part.code)
    try:
        content = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    except Exception as error:  # of any of its passes
        raise InputError(
            f"the model's frozen part cannot be converted for LiteRT: {describe(error)}",
            "use --feature-engine keras",
        ) from None
    Path(spec.output).write_bytes(content)


def feature_pass(prefix: Prefix, threads: int, *, is_keras: bool = False) -> BatchedPass:
    """Return what computes features: LiteRT where the prefix is there for it, unless `is_keras`.

    Raises WorkerError if the prefix cannot be built here.
    """
    dtype = np.dtype(prefix.precision)

    def as_features(outputs: list[Array]) -> Array:
        return outputs[0].astype(dtype)

    if prefix.lite and not is_keras:
        return lite_pass(prefix, as_features, threads)
    return forward_pass(prefix, as_features)


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
