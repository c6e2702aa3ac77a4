"""Cuts: tensors through which every path from a model's inputs to its outputs goes.

At a cut one tensor is alive: a prefix computes it, and a head computes the outputs from it.
"""

import bisect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from csdctl.worker.compute.flops import count_flops_until
from csdctl.worker.compute.keras_internals import (
    flatten_layers,
    keras_mask,
    own_state,
    topological_nodes,
)
from csdctl.worker.protocol.model_info import CutInfo

CHECKED_SAMPLES = 2
"""Of the random samples by which a prefix is tried."""


@dataclass(frozen=True)
class Cut:
    """A tensor between a model's prefix and its head."""

    layer: str
    """The layer whose output it is."""
    tensor: Any
    """A KerasTensor, shape (n, …)."""
    num_parameters: int
    """Of the prefix."""
    num_trainable: int


class NoCutError(Exception):
    """A model has no frozen prefix that features could replace; the text follows the model's name."""


def find_cuts(model: Any) -> list[Cut]:
    """Return the cuts of a functional model with one input, from there to the outputs; none of others.

    Neither the input nor the output is a cut.
    """
    if len(getattr(model, "inputs", None) or ()) != 1:
        return []
    nodes = topological_nodes(model)
    last_use = {id(tensor): number for number, (_, node) in enumerate(nodes) for tensor in node.input_tensors}
    last_use |= {id(tensor): len(nodes) for tensor in model.outputs}
    alive: set[int] = set()
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
        if is_inner and not others and alive == {id(tensor)} and keras_mask(tensor) is None:
            cuts.append(Cut(operation.name, tensor, sum(parameters.values()), sum(trainable.values())))
    return cuts


def describe_cuts(model: Any, keras: Any) -> tuple[CutInfo, ...]:
    """Return what is known of the model's cuts, in the order of `find_cuts`."""
    cuts = find_cuts(model)
    operations = count_flops_until(model, [cut.tensor for cut in cuts], keras) if cuts else []
    return tuple(
        CutInfo(
            cut.layer,
            tuple(size or 0 for size in cut.tensor.shape[1:]),
            math.prod(size or 0 for size in cut.tensor.shape[1:]) * (2 if "16" in cut.tensor.dtype else 4),
            num_operations,
            cut.num_parameters,
            cut.num_trainable,
        )
        for cut, num_operations in zip(cuts, operations, strict=True)
    )


def split_at(model: Any, cut: Cut, keras: Any) -> tuple[Any, Any]:
    """Return prefix and head, which share their layers with `model`."""
    (source,) = model.inputs
    outputs = model.outputs[0] if len(model.outputs) == 1 else model.outputs
    return keras.Model(source, cut.tensor), keras.Model(cut.tensor, outputs)


def frozen_cut(model: Any, keras: Any) -> Cut:
    """Return the last cut before which nothing is trained, changes its state or is drawn at random.

    Raises NoCutError.
    """
    cuts = find_cuts(model)
    if not cuts:
        raise NoCutError("is not a functional model with one input and a single tensor between two layers")
    frozen = [cut for cut in cuts if cut.num_parameters and not cut.num_trainable]
    if not frozen:
        raise NoCutError("has no frozen layers at its beginning")

    def is_constant(cut: Cut) -> bool:
        return _is_constant(split_at(model, cut, keras)[0])

    if is_constant(frozen[-1]):
        return frozen[-1]
    # Whatever is not constant stays so behind it.
    number = bisect.bisect_left(frozen, True, key=lambda cut: not is_constant(cut))
    if not number:
        raise NoCutError("draws random numbers, or changes its state, before its first trainable layer")
    return frozen[number - 1]


def freeze_until(model: Any, name: str) -> bool:
    """Freeze the layer `name` and all that lead to it, in nested models too; return whether there is one."""
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
    """Return whether the same samples always have the same features, in training too."""
    shape = [size or 8 for size in prefix.inputs[0].shape[1:]]
    samples = np.random.default_rng(0).random((CHECKED_SAMPLES, *shape)).astype(np.float32)
    variables = [variable for layer in flatten_layers(prefix) for variable in own_state(layer)]
    before = [np.array(variable.value) for variable in variables]
    outputs = [np.asarray(prefix(samples, training=training)) for training in (True, True, False)]
    after = [np.array(variable.value) for variable in variables]
    for old, variable in zip(before, variables, strict=True):
        variable.assign(old)
    is_unchanged = all(map(np.array_equal, before, after))
    return is_unchanged and all(np.array_equal(outputs[0], other) for other in outputs[1:])
