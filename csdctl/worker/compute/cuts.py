"""Cuts of a model, tensors through which every path from its inputs to its outputs goes, and FLOPs.

At a cut one tensor is alive: a prefix computes it, and a head computes the outputs from it.

FLOPs are the floating-point operations of a forward pass for one sample, counted in the TensorFlow graph of
the model, so that any layer is covered: matrix products and convolutions, a multiply-accumulate as two
operations. Element-wise operations (activations, batch normalization, pooling) are left out: they amount to a
few percent, and are bound by memory rather than by arithmetic. TensorFlow's own profiler does not look into
loops (recurrent layers) and compiled functions (grouped convolutions).
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import keras, tf
from csdctl.worker.compute.keras_internals import (
    flatten_layers,
    global_seed_generator,
    is_its_graph,
    keras_mask,
    nested_graph,
    own_state,
    seed_generators,
    topological_nodes,
)
from csdctl.worker.compute.statistics import Snapshot
from csdctl.worker.protocol.model_info import CutInfo

CHECKED_SAMPLES = 2


def count_flops(model: Any) -> int:
    """Return the FLOPs of one sample. 0 if unknown, as for inputs of variable size. Raises nothing."""
    try:
        return 2 * _count(_trace(model))
    except Exception:  # whatever a user's model raises here, it can be trained without this number
        return 0


def count_flops_until(model: Any, tensors: Sequence[Any]) -> list[int]:
    """Return the FLOPs of one sample from the inputs to each of the model's `tensors`. 0 if unknown."""
    try:
        return [2 * _count([output]) for output in _trace(keras.Model(model.inputs, list(tensors)))]
    except Exception:  # as in `count_flops`
        return [0] * len(tensors)


def _trace(model: Any) -> list[Any]:
    """Return the outputs of the model's graph for one sample."""

    def forward(*inputs: Any) -> Any:
        return model(list(inputs) if len(inputs) > 1 else inputs[0], training=False)

    specs = [tf.TensorSpec((1, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
    outputs: list[Any] = tf.function(forward, autograph=False).get_concrete_function(*specs).graph.outputs
    return outputs


def _count(outputs: Sequence[Any]) -> int:
    """Return the multiply-accumulates of a graph. Raises ValueError if a shape or loop length is unknown."""
    return sum(map(_count_operation, _reachable(outputs)))


def _reachable(outputs: Sequence[Any]) -> list[Any]:
    """Return the operations that the outputs depend on: Keras leaves an unused step of recurrent layers."""
    pending, reachable = [tensor.op for tensor in outputs], {}
    while pending:
        operation = pending.pop()
        if operation.name not in reachable:
            reachable[operation.name] = operation
            pending += [tensor.op for tensor in operation.inputs]
    return list(reachable.values())


def _count_operation(operation: Any) -> int:
    op_type = operation.type
    if op_type in ("PartitionedCall", "StatefulPartitionedCall"):
        return _count(_function(operation, "f").outputs)
    if op_type in ("While", "StatelessWhile"):
        return _loop_length(operation) * _count(_function(operation, "body").outputs)
    shapes = [tensor.shape for tensor in operation.inputs]
    if op_type in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        is_transposed = operation.get_attr("transpose_a" if op_type == "MatMul" else "adj_x")
        return _size(operation.outputs[0].shape) * _size(
            shapes[0][-2:-1] if is_transposed else shapes[0][-1:]
        )
    if op_type == "Einsum":
        return _count_einsum(operation.get_attr("equation").decode(), shapes)
    if op_type in ("Conv2D", "Conv3D"):  # filter: (…, channels in a group, filters)
        return _size(operation.outputs[0].shape) * _size(shapes[1][:-1])
    if op_type == "DepthwiseConv2dNative":  # filter: (height, width, channels, multiplier)
        return _size(operation.outputs[0].shape) * _size(shapes[1][:2])
    if op_type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):  # a transposed convolution, forward
        return _size(shapes[2]) * _size(shapes[1][:-1])
    return 0


def _count_einsum(equation: str, shapes: list[Any]) -> int:
    """Return the product of the sizes of all letters. `...` counts once, from the longest operand."""
    sizes: dict[str, int] = {}
    rest = 1
    for letters, shape in zip(equation.partition("->")[0].split(","), shapes, strict=True):
        before, dots, after = letters.partition("...")
        sizes |= dict(zip(before, shape.as_list(), strict=False))
        sizes |= dict(zip(reversed(after), reversed(shape.as_list()), strict=False))
        if dots:
            rest = max(rest, _size(shape[len(before) : len(shape) - len(after)]))
    return rest * math.prod(sizes.values())


def _loop_length(operation: Any) -> int:
    """Return the iterations of a loop over a sequence, which runs while its counter is below a constant."""
    condition = _function(operation, "cond").get_operations()
    limits = [tf.get_static_value(operation.inputs[1]) for operation in condition if operation.type == "Less"]
    return min(int(limit) for limit in limits if limit is not None)


def _function(operation: Any, attribute: str) -> Any:
    """Return the graph of a function that `operation` calls."""
    return operation.graph._get_function(operation.get_attr(attribute).name).graph


def _size(shape: Any) -> int:
    """Return the number of elements. Raises ValueError if it is unknown."""
    size = shape.num_elements()
    if size is None:
        raise ValueError(f"unknown size: {shape}")
    return int(size)


"""Number of random samples by which a prefix is tried."""


@dataclass(frozen=True)
class Cut:
    """A tensor between a model's prefix and its head."""

    layer: str
    """The layer whose output it is."""
    tensor: Any
    """A KerasTensor, shape (n, …)."""
    num_parameters: int
    """Number of parameters of the prefix."""
    num_trainable: int
    graph: Any
    """The functional model that the tensor is of, which shares its layers with the one that is cut."""


class NoCutError(Exception):
    """A model has no frozen prefix that features could replace. The text follows the model's name."""


def find_cuts(model: Any) -> list[Cut]:
    """Return the cuts of a functional model, from its inputs to its outputs. None of others.

    Behind a cut, no input is used: only the tensor goes there. Models that are layers of the model are cut
    inside, too. Neither an input nor an output is a cut, nor is a place with a weight that is trained on both
    sides of it.
    """
    if not getattr(model, "inputs", None) or not is_its_graph(model):
        return []
    model, names = unroll(model)
    nodes = topological_nodes(model)
    last_use = {id(tensor): number for number, (_, node) in enumerate(nodes) for tensor in node.input_tensors}
    last_use |= {id(tensor): len(nodes) for tensor in model.outputs}
    last_layer = {
        id(variable): number
        for number, (operation, _) in enumerate(nodes)
        for variable in getattr(operation, "trainable_variables", ())
    }
    alive = set(map(id, model.inputs))
    trainable: dict[int, int] = {}
    parameters: dict[int, int] = {}
    cuts = []
    for number, (operation, node) in enumerate(nodes):
        alive |= {id(tensor) for tensor in node.output_tensors}
        alive = {tensor for tensor in alive if last_use.get(tensor, -1) > number}
        for found, kind in ((trainable, "trainable_variables"), (parameters, "variables")):
            found |= {id(variable): math.prod(variable.shape) for variable in getattr(operation, kind, ())}
        tensor, *others = node.output_tensors
        is_inner = bool(node.input_tensors) and last_use.get(id(tensor)) != len(nodes)
        # A mask does not pass a cut: what is behind it would count what it leaves out.
        is_shared = any(last_layer[variable] > number for variable in trainable)
        is_single = not others and alive == {id(tensor)} and not is_shared
        if is_inner and is_single and keras_mask(tensor) is None:
            sums = sum(parameters.values()), sum(trainable.values())
            cuts.append(Cut(names.get(id(tensor), operation.name), tensor, *sums, model))
    return cuts


def _input_of(model: Any) -> Any:
    """Return the inputs as the model takes them: a tensor, a list or a dict."""
    return (getattr(model, "_functional", None) or model).input


def unroll(model: Any) -> tuple[Any, dict[int, str]]:
    """Return a functional model that has the layers of nested models in their place, and computes the same.

    Also names of nested models, by the ids of their outputs. Returns `model` if two layers have one name, or
    one of several outputs, to which losses belong by name, would get another name.
    """
    if not any(nested_graph(operation) for operation, _ in topological_nodes(model)):
        return model, {}
    names: dict[int, str] = {}
    try:
        inputs = keras.tree.map_structure(
            lambda one: keras.Input(batch_shape=one.shape, dtype=one.dtype, name=one.name), _input_of(model)
        )
        unrolled = keras.Model(inputs, _unroll(model, keras.tree.flatten(inputs), names))
    except ValueError:
        return model, {}
    is_renamed = len(model.outputs) > 1 and unrolled.output_names != model.output_names
    return (model, {}) if is_renamed else (unrolled, names)


def _unroll(model: Any, inputs: Sequence[Any], names: dict[int, str]) -> list[Any]:
    """Call the layers of `model` and of models nested in it on symbolic tensors. Return its outputs."""
    graph = getattr(model, "_functional", None) or model
    tensors = {id(tensor): value for tensor, value in zip(graph.inputs, inputs, strict=True)}
    for operation, node in topological_nodes(model):
        if node.is_input:
            continue
        args, kwargs = node.arguments.fill_in(tensors)
        nested = nested_graph(operation)
        if nested and _is_plain_call(args, kwargs, nested):
            outputs = _unroll(nested, args, names)
            names[id(outputs[0])] = operation.name
        else:
            outputs = keras.tree.flatten(operation(*args, **kwargs))
        tensors |= {id(tensor): value for tensor, value in zip(node.outputs, outputs, strict=True)}
    return [tensors[id(tensor)] for tensor in graph.outputs]


def _is_plain_call(args: Sequence[Any], kwargs: Mapping[str, Any], nested: Any) -> bool:
    """Return whether a nested model is called with a tensor that it does not convert.

    Whatever `training` it was called with, Keras passes that of the whole model.
    """
    (wanted,) = nested.inputs
    return (
        len(args) == 1
        and not any(value is not None for name, value in kwargs.items() if name != "training")
        and getattr(args[0], "dtype", None) == wanted.dtype
        and len(args[0].shape) == len(wanted.shape)
    )


def describe_cuts(model: Any) -> tuple[CutInfo, ...]:
    """Return what is known of the model's cuts, in the order of `find_cuts`."""
    cuts = find_cuts(model)
    operations = count_flops_until(cuts[0].graph, [cut.tensor for cut in cuts]) if cuts else []
    return tuple(
        CutInfo(
            cut.layer,
            math.prod(size or 0 for size in cut.tensor.shape[1:]) * (2 if "16" in cut.tensor.dtype else 4),
            num_operations,
            cut.num_trainable,
        )
        for cut, num_operations in zip(cuts, operations, strict=True)
    )


def split_at(cut: Cut) -> tuple[Any, Any]:
    """Return prefix and head, which share their layers with the model that is cut."""
    outputs = cut.graph.outputs[0] if len(cut.graph.outputs) == 1 else cut.graph.outputs
    return keras.Model(_input_of(cut.graph), cut.tensor), keras.Model(cut.tensor, outputs)


def frozen_cut(model: Any) -> Cut:
    """Return the last cut before which nothing is trained, changes its state or is drawn at random.

    Raises NoCutError.
    """
    cuts = find_cuts(model)
    if not cuts:
        raise NoCutError("is not a functional model with a single tensor between two layers")
    frozen = [cut for cut in cuts if cut.num_parameters and not cut.num_trainable]
    if not frozen:
        raise NoCutError("has no frozen first layers")

    if _is_constant(split_at(frozen[-1])[0]):
        return frozen[-1]
    # Whatever is not constant stays so behind it.
    number = bisect.bisect_left(frozen, True, key=lambda cut: not _is_constant(split_at(cut)[0]))
    if not number:
        raise NoCutError("draws random numbers, or changes its state, before its first trainable layer")
    return frozen[number - 1]


def freeze_until(model: Any, name: str) -> bool:
    """Freeze the layer `name` and all that lead to it, in nested models too. Return whether there is one."""
    if not getattr(model, "inputs", None):
        return False
    for operation, node in topological_nodes(model):
        is_inner = operation.name != name and freeze_until(operation, name)
        if operation.name != name and not is_inner:
            continue
        pending = list(node.parent_nodes) if is_inner else [node]
        while pending:
            above = pending.pop()
            above.operation.trainable = False
            pending += above.parent_nodes
        return True
    return False


def _is_constant(prefix: Any) -> bool:
    """Return whether the same samples always have the same features, in training too.

    What draws random numbers says so by the state of its generator: its draws may be equal by chance.
    """
    generator = np.random.default_rng(0)

    def draw(tensor: Any) -> Any:
        shape = CHECKED_SAMPLES, *(size or 8 for size in tensor.shape[1:])
        return generator.random(shape).astype(np.float32)

    samples = keras.tree.map_structure(draw, _input_of(prefix))
    variables = [variable for layer in flatten_layers(prefix) for variable in own_state(layer)]
    generators = [global_seed_generator(), *(generator for _, generator in seed_generators(prefix))]
    variables += [generator.state for generator in generators]
    before = Snapshot(variables)
    outputs = [np.asarray(prefix(samples, training=training)) for training in (True, True, False)]
    is_unchanged = before.is_current()
    before.restore()
    return is_unchanged and all(np.array_equal(outputs[0], other) for other in outputs[1:])
