"""FLOPs of a model: the floating-point operations of its forward pass for one sample.

Counted in the TensorFlow graph of the model, so that any layer is covered: matrix products and convolutions,
a multiply-accumulate as two operations. Element-wise operations (activations, batch normalization, pooling)
are left out: they amount to a few percent, and are bound by memory rather than by arithmetic. TensorFlow's
own profiler does not look into loops (recurrent layers) and compiled functions (grouped convolutions).
"""

import math
from collections.abc import Sequence
from typing import Any

FUNCTION_ATTRIBUTES = {"PartitionedCall": "f", "StatefulPartitionedCall": "f"}
LOOPS = ("While", "StatelessWhile")


def count_flops(model: Any) -> int:
    """Return the FLOPs of one sample; 0 if unknown, as for inputs of variable size. Raises nothing."""
    import tensorflow as tf

    def forward(*inputs: Any) -> Any:
        return model(list(inputs) if len(inputs) > 1 else inputs[0], training=False)

    try:
        specs = [tf.TensorSpec((1, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
        graph = tf.function(forward, autograph=False).get_concrete_function(*specs).graph
        return 2 * _count(graph, tf)
    except Exception:  # whatever a user's model raises here, it can be trained without this number
        return 0


def count_flops_until(model: Any, tensors: Sequence[Any], keras: Any) -> list[int]:
    """Return the FLOPs of one sample from the only input to each of the model's `tensors`; 0 if unknown."""
    import tensorflow as tf

    (source,) = model.inputs
    try:
        until = keras.Model(source, list(tensors))
        spec = tf.TensorSpec((1, *source.shape[1:]), source.dtype)
        traced = tf.function(lambda sample: until(sample, training=False), autograph=False)
        outputs = traced.get_concrete_function(spec).graph.outputs
        return [2 * _count_until([output], tf) for output in outputs]
    except Exception:  # as in `count_flops`
        return [0] * len(tensors)


def _count(graph: Any, tf: Any) -> int:
    """Return the multiply-accumulates of a graph; raises ValueError if a shape or loop length is unknown."""
    return _count_until(graph.outputs, tf)


def _count_until(outputs: Sequence[Any], tf: Any) -> int:
    return sum(_count_operation(operation, tf) for operation in _reachable(outputs))


def _reachable(outputs: Sequence[Any]) -> list[Any]:
    """Return the operations that the outputs depend on: Keras leaves an unused step of recurrent layers."""
    pending, reachable = [tensor.op for tensor in outputs], {}
    while pending:
        operation = pending.pop()
        if operation.name not in reachable:
            reachable[operation.name] = operation
            pending += [tensor.op for tensor in operation.inputs]
    return list(reachable.values())


def _count_operation(operation: Any, tf: Any) -> int:
    op_type = operation.type
    if op_type in FUNCTION_ATTRIBUTES:
        return _count(_function(operation, FUNCTION_ATTRIBUTES[op_type]), tf)
    if op_type in LOOPS:
        return _loop_length(operation, tf) * _count(_function(operation, "body"), tf)
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
    """Return the product of the sizes of all letters; `...` counts once, from the longest operand."""
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
    """Return the iterations of a loop over a sequence, which runs while its counter is below a constant."""
    condition = _function(operation, "cond").get_operations()
    limits = [tf.get_static_value(operation.inputs[1]) for operation in condition if operation.type == "Less"]
    return min(int(limit) for limit in limits if limit is not None)


def _function(operation: Any, attribute: str) -> Any:
    """Return the graph of a function that `operation` calls."""
    return operation.graph._get_function(operation.get_attr(attribute).name).graph


def _size(shape: Any) -> int:
    """Return the number of elements; raises ValueError if it is unknown."""
    size = shape.num_elements()
    if size is None:
        raise ValueError(f"unknown size: {shape}")
    return int(size)
