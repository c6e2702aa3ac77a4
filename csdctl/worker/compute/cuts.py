"""Cuts of a model, tensors through which every path from its inputs to its outputs goes, and FLOPs.

At a cut one tensor is alive: a prefix computes it, and a head computes the outputs from it.

FLOPs are the floating-point operations of a forward pass for one sample. They follow from the weights: each
element of a matrix or filter is multiplied and added once for each position of a layer's output, such as a
pixel or a time step. Products of two activations and element-wise operations are left out.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from csdctl.worker.compute import keras_internals as internals
from csdctl.worker.compute.backend import keras
from csdctl.worker.protocol.model_info import CutInfo

CHECKED_SAMPLES = 2
"""Number of random samples by which a prefix is tried."""


def count_flops(model: Any) -> int:
    """Return the FLOPs of one sample. 0 if unknown, as for inputs of variable size and subclassed models."""
    if not internals.has_graph(model):
        return 0
    flops = sum(_count_flops(*call) for call in internals.topological_nodes(unroll(model)[0]))
    return 0 if math.isnan(flops) else int(flops)


def _count_flops(operation: Any, node: Any) -> float:
    """Return the FLOPs of a call of a layer for one sample. NaN if they are unknown."""
    if internals.has_graph(operation):  # a model that is a layer
        return sum(_count_flops(*call) for call in internals.topological_nodes(operation))
    kind = type(operation).__name__
    variables = () if kind.endswith("Embedding") else getattr(operation, "weights", ())
    matrices = (variable for variable in variables if len(variable.shape) > 1 and variable.name != "bias")
    num_weights = sum(math.prod(variable.shape) for variable in matrices)
    if not num_weights:
        return 0.0
    is_by_input = isinstance(operation, keras.layers.RNN | keras.layers.Bidirectional) or "Transpose" in kind
    tensor = (node.input_tensors if is_by_input else node.output_tensors)[0]
    is_first = getattr(operation, "data_format", "") == "channels_first"
    positions = tensor.shape[2:] if is_first else tensor.shape[1:-1]
    sizes = (math.nan if size is None else float(size) for size in positions)
    flops: float = 2.0 * num_weights * math.prod(sizes)
    return flops


@dataclass(frozen=True)
class Cut:
    """A tensor between a model's prefix and its head."""

    layer: str
    tensor: Any
    num_parameters: int
    num_trainable: int
    num_operations: int
    """FLOPs of the prefix for one sample. 0 if unknown."""
    graph: Any
    """The functional model that the tensor is of, which shares its layers with the one that is cut."""

    def describe(self) -> CutInfo:
        """Return what the host and its plans know of the cut."""
        num_elements = math.prod(size or 0 for size in self.tensor.shape[1:])
        num_bytes = num_elements * (2 if "16" in self.tensor.dtype else 4)
        return CutInfo(self.layer, num_bytes, self.num_operations, self.num_trainable)


class NoCutError(Exception):
    """A model has no frozen prefix that features could replace. The text follows the model's name."""


def find_cuts(model: Any) -> list[Cut]:
    """Return the cuts of a functional model, from its inputs to its outputs. None of others.

    Behind a cut, no input is used: only the tensor goes there. Models that are layers of the model are cut
    inside, too. Neither an input nor an output is a cut, nor is a place with a weight that is trained on both
    sides of it.
    """
    if not getattr(model, "inputs", None) or not internals.has_default_forward_and_loss(model):
        return []
    model, names = unroll(model)
    nodes = internals.topological_nodes(model)
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
    cuts, flops = [], 0.0
    for number, (operation, node) in enumerate(nodes):
        alive |= {id(tensor) for tensor in node.output_tensors}
        alive = {tensor for tensor in alive if last_use.get(tensor, -1) > number}
        for sizes, kind in ((trainable, "trainable_variables"), (parameters, "variables")):
            sizes |= {id(variable): math.prod(variable.shape) for variable in getattr(operation, kind, ())}
        flops += _count_flops(operation, node)
        tensor = node.output_tensors[0]
        is_inner = bool(node.input_tensors) and last_use.get(id(tensor)) != len(nodes)
        is_single = len(node.output_tensors) == 1 and alive == {id(tensor)}
        is_shared = any(last_layer[variable] > number for variable in trainable)
        # A mask does not pass a cut: the layers after it would count what it leaves out.
        if is_inner and is_single and not is_shared and internals.keras_mask(tensor) is None:
            sums = sum(parameters.values()), sum(trainable.values()), 0 if math.isnan(flops) else int(flops)
            cuts.append(Cut(names.get(id(tensor), operation.name), tensor, *sums, model))
    return cuts


def _input_of(model: Any) -> Any:
    return internals.functional_graph(model).input


def unroll(model: Any) -> tuple[Any, dict[int, str]]:
    """Return a functional model that has the layers of nested models in their place, and computes the same.

    Also names of nested models, by the ids of their outputs. Returns `model` if two layers have one name, or
    one of several outputs, to which losses belong by name, would get another name.
    """
    names: dict[int, str] = {}
    if not any(internals.nested_graph(operation) for operation, _ in internals.topological_nodes(model)):
        return model, names
    try:
        inputs = keras.tree.map_structure(
            lambda tensor: keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=tensor.name),
            _input_of(model),
        )
        unrolled = keras.Model(inputs, _unroll(model, keras.tree.flatten(inputs), names))
    except ValueError:
        return model, {}
    is_renamed = len(model.outputs) > 1 and unrolled.output_names != model.output_names
    return (model, {}) if is_renamed else (unrolled, names)


def _unroll(model: Any, inputs: Sequence[Any], names: dict[int, str]) -> list[Any]:
    graph = internals.functional_graph(model)
    tensors = {id(tensor): value for tensor, value in zip(graph.inputs, inputs, strict=True)}
    for operation, node in internals.topological_nodes(model):
        if node.is_input:
            continue
        args, kwargs = node.arguments.fill_in(tensors)
        nested = internals.nested_graph(operation)
        if nested and _is_plain_call(args, kwargs, nested):
            outputs = _unroll(nested, args, names)
            names[id(outputs[0])] = operation.name
        else:
            outputs = keras.tree.flatten(operation(*args, **kwargs))
        tensors |= {id(tensor): value for tensor, value in zip(node.outputs, outputs, strict=True)}
    return [tensors[id(tensor)] for tensor in graph.outputs]


def _is_plain_call(args: Sequence[Any], kwargs: Mapping[str, Any], nested: Any) -> bool:
    """Return whether a nested model gets a tensor as it is, and no arguments that change what it computes."""
    (tensor,) = nested.inputs
    return (
        len(args) == 1
        and not any(value is not None for name, value in kwargs.items() if name != "training")
        and getattr(args[0], "dtype", None) == tensor.dtype
        and len(args[0].shape) == len(tensor.shape)
    )


def split_at(cut: Cut) -> tuple[Any, Any]:
    """Return prefix and head, which share their layers with the model that is cut."""
    outputs = cut.graph.outputs[0] if len(cut.graph.outputs) == 1 else cut.graph.outputs
    return keras.Model(_input_of(cut.graph), cut.tensor), keras.Model(cut.tensor, outputs)


def frozen_cut(model: Any) -> Cut:
    """Return the last cut before which nothing is trained, changed or drawn at random. Raises NoCutError."""
    cuts = find_cuts(model)
    if not cuts:
        raise NoCutError("is not a functional model with a single tensor between two layers")
    frozen = [cut for cut in cuts if cut.num_parameters and not cut.num_trainable]
    if not frozen:
        raise NoCutError("has no frozen first layers")

    if _is_constant(split_at(frozen[-1])[0]):
        return frozen[-1]
    # Once an output is not constant, neither are those after it.
    number = bisect.bisect_left(frozen, True, key=lambda cut: not _is_constant(split_at(cut)[0]))
    if not number:
        raise NoCutError("draws random numbers, or changes its state, before its first trainable layer")
    return frozen[number - 1]


def freeze_until(model: Any, name: str) -> bool:
    """Freeze the layer `name` and all that lead to it, in nested models too. Return whether there is one."""
    if not getattr(model, "inputs", None):
        return False
    for operation, node in internals.topological_nodes(model):
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
    """Return whether the same samples have the same features in training, and no generator has drawn."""
    generator = np.random.default_rng(0)

    def draw(tensor: Any) -> Any:
        shape = CHECKED_SAMPLES, *(size or 8 for size in tensor.shape[1:])
        return generator.random(shape).astype(np.float32)

    samples = keras.tree.map_structure(draw, _input_of(prefix))
    variables = [
        variable
        for layer in internals.flatten_layers(prefix)
        for variable in internals.non_trainable_state(layer)
    ]
    variables += [
        internals.global_seed_generator().state,
        *(seeds.state for seeds in internals.seed_generators(prefix)),
    ]
    before = [np.asarray(variable.value).copy() for variable in variables]
    outputs = [np.asarray(prefix(samples, training=training)) for training in (True, True, False)]
    after = [np.asarray(variable.value) for variable in variables]
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    is_unchanged = all(map(np.array_equal, before, after))
    return is_unchanged and all(np.array_equal(outputs[0], output) for output in outputs[1:])
