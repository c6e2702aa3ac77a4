"""Forward passes of Keras models: compiled, and computed here where they cannot be. The model of a head."""

import functools
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import keras, load_backend, tf
from csdctl.worker.compute.compile import GRAPH, INFO, STATE_FILE, assign, compile_step, make_compiler
from csdctl.worker.compute.keras_internals import topological_nodes
from csdctl.worker.compute.model import load, save_model
from csdctl.worker.compute.objective import as_tensors, inputs_of, specs_of
from csdctl.worker.compute.trace import CannotCompileError, GraphBuilder, Values
from csdctl.worker.data.arrays import Array, dtype_from_text, save_arrays
from csdctl.worker.engine.forward import BATCH_SIZE, FORWARD, Compute, ForwardInfo
from csdctl.worker.engine.step import VariableInfo
from csdctl.worker.process.errors import InputError
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import (
    AllCompiled,
    Compiled,
    CompileRequest,
    CompileRequests,
    ForwardRequest,
)
from csdctl.worker.protocol.run_spec import HeadSpec, Prefix, RunSpec, Runtime

MAX_CONSTANT_BYTES = 1 << 27
"""Weights up to this size are constants of the graph: those of batch norm become a part of convolutions'.
Larger ones are arguments, for a graph is in memory three times while it is loaded."""


def compile_all(requests: CompileRequests) -> AllCompiled:
    """Compile forward passes and steps. Raises WorkerError if ranks cannot take a step."""
    load_backend()
    gc.disable()  # nothing is freed, and it would visit the growing graphs again and again
    forwards = map(compile_forward, requests.forwards)
    return AllCompiled((*forwards, *map(_compile_step, requests.steps)))


def _compile_step(request: CompileRequest) -> Compiled:
    if not all(request.data.sample_shape):  # of a head whose features are only known by computing them
        return Compiled("the size of its samples is not fixed")
    return compile_step(request)


def compile_forward(request: ForwardRequest) -> Compiled:
    """Compile a forward pass, and write it to the request's `output`. Raises WorkerError as `load`."""
    model = load(Path(request.architecture), Path(request.weights), request.code)
    output, builder = Path(request.output), GraphBuilder()
    computed = _up_to(model, request.layer)
    values = [np.asarray(one.value) for one in computed.weights]
    arguments = values if sum(one.nbytes for one in values) > MAX_CONSTANT_BYTES else []
    empty = np.empty((BATCH_SIZE, *request.sample_shape), dtype_from_text(request.dtype))
    (samples,) = specs_of([empty], BATCH_SIZE)
    fields = samples if isinstance(samples, dict) else {"": samples}
    count = len(arguments)

    def forward(scope: Values, *given: Any) -> list[Any]:
        state = given[:count] or list(map(tf.constant, values))
        batch = dict(zip(fields, given[count:], strict=True))
        with scope.given(computed.weights, state):
            inputs = inputs_of(model, batch if isinstance(samples, dict) else batch[""], request.input_range)
            outputs = keras.tree.flatten(computed(inputs, training=False))
            return [tf.cast(one, tf.float32) for one in outputs]

    specs = {f"state_{place}": tf.TensorSpec(one.shape, one.dtype) for place, one in enumerate(arguments)}
    specs |= {f"samples_{place}": one for place, one in enumerate(fields.values())}
    try:
        builder.add((FORWARD,), forward, specs)
        if builder.unknown:
            raise CannotCompileError(f"a layer has a variable of its own: {builder.unknown[0].name}")
        (output / GRAPH).write_bytes(builder.optimize())
    except CannotCompileError as error:
        return Compiled(error.message)
    save_arrays(output / STATE_FILE, {f"v{place:05d}": one for place, one in enumerate(arguments)})
    variables = tuple(VariableInfo(one.shape, one.dtype.name) for one in arguments)
    info = ForwardInfo(builder.functions, variables)
    (output / INFO).write_text(to_json(info))
    return Compiled()


def keras_pass(part: Prefix, layer: str, runtime: Runtime) -> Compute:
    """Return what computes a batch with Keras. Raises WorkerError if the model cannot be built here."""
    load_backend(runtime)
    model = load(Path(part.architecture), Path(part.weights), part.code)
    computed = _up_to(model, layer)

    def forward(samples: Any) -> Any:
        outputs = computed(inputs_of(model, samples, part.input_range), training=False)
        return keras.tree.flatten(outputs)

    graph = tf.function(forward, autograph=False, reduce_retracing=True)
    return lambda samples: list(map(np.asarray, graph(as_tensors(samples))))


def _up_to(model: Any, layer: str) -> Any:
    """Return the model, or the part of it that computes `layer`."""
    return keras.Model(model.inputs, output_of(model, layer)) if layer else model


def output_of(model: Any, layer: str) -> Any:
    """Return the tensor that the layer of this name computes. Raises WorkerError if there is not one."""
    nodes = topological_nodes(model) if getattr(model, "inputs", None) else []
    for operation, node in reversed(nodes):
        if operation.name == layer and len(node.output_tensors) == 1:
            return node.output_tensors[0]
    raise InputError(
        f"the model's graph has no layer {layer} with one output", "name one of its layers with --layer"
    )


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


def save_with_keras(spec: RunSpec, example: tuple[Array, Array], values: Sequence[Array], path: Path) -> Path:
    """Save the model of a run with the values of its state, then of its learning rates. Return the path.

    The file is .keras, or has the weights alone where Keras cannot save the model. Raises OSError.
    """
    model = load(Path(spec.architecture), Path(spec.weights), spec.code)
    compiler = make_compiler(model, spec.recipe, example)
    num_rates = len(compiler.rates)
    rates = zip(compiler.rates, values[len(values) - num_rates :], strict=True)
    for variable, value in [*zip(compiler.variables, values, strict=False), *rates]:
        assign(variable, value)
    return save_model(assemble(spec.head, model) if spec.head else model, path)
