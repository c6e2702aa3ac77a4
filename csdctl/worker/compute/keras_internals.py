"""Every private attribute of Keras that csdctl uses, and why. The cap on Keras in pyproject.toml points here.

Written for Keras 3.15. tests/unit/worker/compute covers every use. protocol/model_info.py has one more.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

from csdctl.worker.compute.backend import keras
from csdctl.worker.protocol.model_info import OwnCompile


def flatten_layers(model: Any) -> list[Any]:
    """Return the layers of `model`, of models nested in it and wrapped ones, each once, in a fixed order.

    `Model.layers` has the top level only.
    """
    layers = model._flatten_layers(include_self=False, recursive=True)
    return [layer for layer in layers if layer is not model]


def own_state(layer: Any) -> list[Any]:
    """Return the non-trainable variables that `layer` itself owns.

    `non_trainable_variables` has those of sublayers, and frozen weights, too.
    """
    return list(layer._non_trainable_variables)


def seed_generators(model: Any) -> list[tuple[str, Any]]:
    """Return the seed generators of `model` and its layers, with the layers' names, in a fixed order.

    They are the random states of dropout and augmentation. There is no public list.
    """
    return [
        (layer.name, generator)
        for layer in (*flatten_layers(model), model)
        for generator in getattr(layer, "_seed_generators", ())
    ]


def regularization_losses(model: Any) -> list[Any]:
    """Return the penalties on the weights of `model`, which `losses` mixes with those on activities."""
    return list(model._get_regularization_losses())


def compute_loss(
    model: Any, inputs: Any, targets: Any, predictions: Any, weights: Any, *, training: bool
) -> Any:
    """Return what compute_loss of the user's own returns, which may lack the argument `training`."""
    return model._compute_loss(inputs, targets, predictions, weights, training=training)


def run_symbolically(code: Any, *symbols: Any) -> None:
    """Run `code` on symbolic tensors, as Keras does to create the state of losses and metrics."""
    keras.src.backend.compute_output_spec(code, *symbols)


def compiled_loss(model: Any, targets: Any, predictions: Any, weights: Any) -> Any:
    """Return the loss of compile() without what layers add. None if the model was compiled without one.

    `compute_loss` cannot add the losses of layers to it when these compute in 16 bits.
    """
    return None if model._compile_loss is None else model._compile_loss(targets, predictions, weights)


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return what the model was compiled with, by the names of compile()'s arguments. {} if it was not.

    `get_compile_config` serializes them, which fails for losses that are not at the top level of a module.
    """
    compiled = getattr(model, "_compile_config", None)
    return dict(compiled.config) if model.compiled and compiled is not None else {}


def loss_of(model: Any) -> float:
    """Return the mean loss of the batches since `reset_metrics`. `get_metrics_result` lacks it in a step."""
    return float(model._loss_tracker.result())


def loss_trackers(model: Any) -> list[Any]:
    """Return the metrics that average the loss of each output. Those of one output have none.

    They count batches, not samples, when the size of a batch is not known beforehand.
    """
    return list(model._compile_loss.metrics) if model._compile_loss is not None else []


@contextlib.contextmanager
def noting_divisors(found: dict[Any, tuple[Any, Any]]) -> Iterator[None]:
    """Note what Keras divides each loss by: unmasked elements, the sum of the weights, or samples.

    `found` gets a key for each different divisor, and the divisor, None for samples. Then its mask, which
    keeps the key unique. Weights (n,) apply to all elements of a sample, as weights (n, 1) do in fit.
    """
    module = keras.src.losses.loss
    original = module.reduce_weighted_values

    def reduce(values: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
        is_weighed = sample_weight is not None and reduction == "mean_with_sample_weight"
        key = (is_weighed and id(sample_weight), id(mask))
        if sample_weight is not None:
            sample_weight = keras.ops.cast(sample_weight, values.dtype)
            if len(sample_weight.shape) == 1 < len(values.shape):
                sample_weight = keras.ops.reshape(sample_weight, (-1, *[1] * (len(values.shape) - 1)))
        counted = module.apply_mask(sample_weight if is_weighed else None, mask, "float32", "sum")
        found.setdefault(key, (None if counted is None else keras.ops.sum(counted), mask))
        return original(values, sample_weight, mask, reduction, dtype)

    with mock.patch.object(module, "reduce_weighted_values", reduce):
        yield


def keras_mask(tensor: Any) -> Any:
    """Return the mask of a prediction, whose elements the loss leaves out, or None."""
    return getattr(tensor, "_keras_mask", None)


def build_symbolically(model: Any, data: Any) -> None:
    """Create the state of losses and metrics of compile(), given a batch of symbolic tensors.

    Nothing is created for a model without call(), which may have its own train_step. Nor is the optimizer
    built, which fit does in the first step: train_step may train layers that call() does not use.
    """
    with contextlib.suppress(Exception), mock.patch.object(model, "optimizer", None):
        model._symbolic_build(data_batch=data)


def find_optimizers(model: Any) -> list[Any]:
    """Return the optimizers that a train_step uses: global ones that it names, else those of `model`."""
    for named in (find_globals(model), vars(model).values()):
        if found := [one for one in named if isinstance(one, keras.optimizers.Optimizer)]:
            others = [one for one in found if one is not getattr(model, "optimizer", None)]
            # compile() of the user's own that calls Keras' without an optimizer leaves the default, RMSprop.
            is_own = type(model).compile is not keras.Model.compile
            if others and is_own and "optimizer" not in _names_of(model):
                found = others
            return list({id(one): one for one in found}.values())
    return []


def _names_of(model: Any) -> tuple[str, ...]:
    """Return the names that the code of train_step has, of attributes too."""
    function = getattr(model.train_step, "__func__", model.train_step)
    code = getattr(getattr(function, "python_function", function), "__code__", None)
    return code.co_names if code else ()


def find_globals(model: Any) -> list[Any]:
    """Return the global values that train_step names, and those that functions of its file name for it."""
    found: dict[int, Any] = {}
    waiting = [getattr(model.train_step, "__func__", model.train_step)]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "python_function", function)  # of a tf.function
        for name in function.__code__.co_names if inspect.isfunction(function) else ():
            value = function.__globals__.get(name)
            if id(value) not in found:
                found[id(value)] = value
                is_beside = getattr(value, "__module__", None) == function.__module__
                waiting += [value] if is_beside and not inspect.isclass(value) else []
    return list(found.values())


def optimizer_classes() -> list[Any]:
    """Return the base class of Keras' optimizers and all of its subclasses, the user's included."""
    found = [keras.src.optimizers.base_optimizer.BaseOptimizer]
    for kind in found:
        found += kind.__subclasses__()
    return list(dict.fromkeys(found))


def global_seed_generator() -> Any:
    """Return the generator that random operations without one of their own use."""
    return keras.src.random.seed_generator.global_seed_generator()


def nested_graph(operation: Any) -> Any:
    """Return the graph of a model with one input and one output that is a layer of another. None for others.

    A class of the user's own may compute more than its graph.
    """
    call = getattr(type(operation), "call", None)
    graph = operation if call is keras.src.models.Functional.call else None
    if call is keras.Sequential.call:
        graph = operation._functional
    return graph if graph is not None and len(graph.inputs) == len(graph.outputs) == 1 else None


def is_its_graph(model: Any) -> bool:
    """Return whether a model computes its graph and Keras' loss, which a class of the user's may override."""
    kind, plain = type(model), keras.Model
    return (
        kind.call in (keras.src.models.Functional.call, keras.Sequential.call)
        and kind.compute_loss is plain.compute_loss
        and kind.compute_metrics is plain.compute_metrics
    )


def excluding_alike(optimizer: Any, other: Any) -> Any:
    """Return `optimizer`, which excludes from weight decay what `other` does: no configuration has it."""
    vars(optimizer).update({k: v for k, v in vars(other).items() if k.startswith("_exclude_from_weight")})
    return optimizer


def topological_nodes(model: Any) -> list[tuple[Any, Any]]:
    """Return the operations of a functional or sequential model with their nodes, inputs first.

    The public list of layers does not say which tensors go where.
    """
    graph = getattr(model, "_functional", None) or model
    return [
        (node.operation, node)
        for depth in sorted(graph._nodes_by_depth, reverse=True)
        for node in graph._nodes_by_depth[depth]
    ]


def describe_compile(model: Any) -> OwnCompile | None:
    """Return what `model` was compiled with, None if it was not."""
    own = compile_arguments(model)
    if not own:
        return None
    # One, several, or by output.
    given = keras.tree.flatten([own.get("metrics"), own.get("weighted_metrics")])
    metrics = tuple(
        one if isinstance(one, str) else getattr(one, "name", None) or one.__name__
        for one in given
        if one is not None
    )
    optimizer = keras.optimizers.get(own.get("optimizer"))
    if optimizer is None:
        return OwnCompile("", 0.0, "", metrics)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a model with float16
    rate, schedule = optimizer.get_config()["learning_rate"], ""
    if isinstance(rate, dict):
        schedule = str(rate.get("class_name", ""))
        rate = optimizer.learning_rate  # the first
    rate = float(f"{float(rate):.7g}")  # as it was written: Keras keeps a float32
    return OwnCompile(type(optimizer).__name__, rate, schedule, metrics)


def find_scaling_layers(model: Any) -> tuple[str, ...]:
    """Return the layers of `model`, and of models in it, that scale what they are given."""
    kinds = (keras.layers.Rescaling, keras.layers.Normalization)
    found = (layer for layer in flatten_layers(model) if isinstance(layer, kinds))
    return tuple(f"{layer.name} ({type(layer).__name__})" for layer in found)


def find_smallest_embedding(model: Any) -> int | None:
    """Return the size of the smallest embedding, beyond which an integer may be an error. None without."""
    sizes = (
        getattr(layer, "input_dim", None)
        for layer in flatten_layers(model)
        if type(layer).__name__.endswith("Embedding")
    )
    return min((size for size in sizes if isinstance(size, int)), default=None)
