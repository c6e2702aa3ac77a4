"""How much a model computes: the floating-point operations of its forward pass for one sample.

Counted in the graph that TensorFlow makes of the model, so that it does not matter which layers it has:
matrix products and convolutions, a multiply-accumulate as two. What goes over the numbers one by one
(activations, batch normalization, pooling) is left out: a few percent, and bound by memory rather than by
arithmetic. TensorFlow's own profiler does not look into loops (recurrent layers) and compiled parts
(grouped convolutions).
"""

import math
from typing import Any

FUNCTION_ATTRIBUTES = {"PartitionedCall": "f", "StatefulPartitionedCall": "f"}
LOOPS = ("While", "StatelessWhile")


def count_operations(model: Any) -> int:
    """Operations of one sample; 0 when they cannot be told, as for inputs of any size. Raises nothing."""
    import tensorflow as tf

    def forward(*inputs: Any) -> Any:
        return model(list(inputs) if len(inputs) > 1 else inputs[0], training=False)

    try:
        specs = [tf.TensorSpec((1, *one.shape[1:]), one.dtype) for one in model.inputs]
        graph = tf.function(forward, autograph=False).get_concrete_function(*specs).graph
        return 2 * _count(graph, tf)
    except Exception:  # whatever a user's model does here, it can be trained without this number
        return 0


def _count(graph: Any, tf: Any) -> int:
    """Multiply-accumulates of a graph; raises ValueError when a shape or a loop's length is not known."""
    return sum(_count_one(operation, tf) for operation in _needed(graph))


def _needed(graph: Any) -> list[Any]:
    """What the outputs depend on: Keras leaves a step of a recurrent layer behind that never runs."""
    pending, needed = [one.op for one in graph.outputs], {}
    while pending:
        operation = pending.pop()
        if operation.name not in needed:
            needed[operation.name] = operation
            pending += [one.op for one in operation.inputs]
    return list(needed.values())


def _count_one(operation: Any, tf: Any) -> int:
    kind = operation.type
    if kind in FUNCTION_ATTRIBUTES:
        return _count(_function(operation, FUNCTION_ATTRIBUTES[kind]), tf)
    if kind in LOOPS:
        return _loop_length(operation, tf) * _count(_function(operation, "body"), tf)
    shapes = [one.shape for one in operation.inputs]
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        is_turned = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return _size(operation.outputs[0].shape) * _size(shapes[0][-2:-1] if is_turned else shapes[0][-1:])
    if kind == "Einsum":
        return _count_einsum(operation.get_attr("equation").decode(), shapes)
    if kind in ("Conv2D", "Conv3D"):  # filter: (…, channels in a group, filters)
        return _size(operation.outputs[0].shape) * _size(shapes[1][:-1])
    if kind == "DepthwiseConv2dNative":  # filter: (height, width, channels, multiplier)
        return _size(operation.outputs[0].shape) * _size(shapes[1][:2])
    if kind in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):  # a transposed convolution, forward
        return _size(shapes[2]) * _size(shapes[1][:-1])
    return 0


def _count_einsum(equation: str, shapes: list[Any]) -> int:
    """The product of all letters' sizes; what `...` stands for is counted once, from the longest operand."""
    sizes: dict[str, int] = {}
    rest = 1
    for letters, shape in zip(equation.partition("->")[0].split(","), shapes, strict=True):
        before, dots, after = letters.partition("...")
        sizes |= dict(zip(before, shape.as_list(), strict=False))
        sizes |= dict(zip(reversed(after), reversed(shape.as_list()), strict=False))
        if dots:
            rest = max(rest, _size(shape[len(before) : len(shape) - len(after)]))
    return rest * math.prod(sizes.values())


def _loop_length(operation: Any, tf: Any) -> int:
    """Rounds of a loop over a sequence, which goes on while its counter is less than a number."""
    condition = _function(operation, "cond").get_operations()
    limits = [tf.get_static_value(one.inputs[1]) for one in condition if one.type == "Less"]
    return min(int(limit) for limit in limits if limit is not None)


def _function(operation: Any, attribute: str) -> Any:
    """The graph of a function that `operation` calls."""
    return operation.graph._get_function(operation.get_attr(attribute).name).graph


def _size(shape: Any) -> int:
    """The number of elements; raises ValueError when it is not known."""
    size = shape.num_elements()
    if size is None:
        raise ValueError(f"no known size: {shape}")
    return int(size)
