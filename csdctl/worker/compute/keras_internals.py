"""The private attributes of Keras that csdctl uses, and why. The cap on Keras in pyproject.toml points here.

Written for Keras 3.15. tests/unit/worker/compute covers every use. Two more are in modules that cannot import
this one: protocol/model_info.py and compute/backend.py.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

from csdctl.worker.compute.backend import keras
from csdctl.worker.engine.step import ROUNDOFFS


def flatten_layers(model: Any) -> list[Any]:
    """Return the layers of `model`, of models nested in it and wrapped ones, each once, in a fixed order."""
    layers = model._flatten_layers(include_self=False, recursive=True)
    return [layer for layer in layers if layer is not model]


def compute_type(model: Any) -> str:
    """Return the coarsest type that a layer with weights computes in."""
    types = {layer.compute_dtype for layer in flatten_layers(model) if layer.weights} & set(ROUNDOFFS)
    coarsest: str = max(types or {model.compute_dtype}, key=ROUNDOFFS.__getitem__)
    return coarsest


def widen(model: Any) -> None:
    """Let layers that compute in 16 bits compute in float32 from now on. The weights keep their type.

    16-bit kernels may differ by as much as one sample contributes: some add in 16 bits, others in 32.
    """
    for layer in (model, *flatten_layers(model)):
        if layer.compute_dtype in ("float16", "bfloat16"):
            layer.dtype_policy = _make_policy("float32", layer.dtype_policy.variable_dtype)


def _make_policy(dtype: str, variable_dtype: str) -> Any:

    class Policy(keras.DTypePolicy):  # type: ignore[misc]
        @property
        def variable_dtype(self) -> str:
            return variable_dtype

    return Policy(dtype)


def non_trainable_state(layer: Any) -> list[Any]:
    """Return the non-trainable variables of `layer` without its sublayers and without frozen weights."""
    return list(layer._non_trainable_variables)


def seed_generators(model: Any) -> list[Any]:
    """Return the seed generators of `model` and its layers, in a fixed order. There is no public list."""
    layers = *flatten_layers(model), model
    return [generator for layer in layers for generator in getattr(layer, "_seed_generators", ())]


def global_seed_generator() -> Any:
    """Return the generator that random operations without one of their own use."""
    return keras.src.random.seed_generator.global_seed_generator()


def regularization_losses(model: Any) -> list[Any]:
    """Return the penalties on the weights of `model`, which `losses` mixes with those on activities."""
    return list(model._get_regularization_losses())


def compute_loss(
    model: Any, inputs: Any, targets: Any, predictions: Any, weights: Any, *, training: bool
) -> Any:
    """Return the result of the user's compute_loss, which may lack the argument `training`."""
    return model._compute_loss(inputs, targets, predictions, weights, training=training)


def compiled_loss(model: Any, targets: Any, predictions: Any, weights: Any) -> Any:
    """Return the loss of compile(), without what layers add, whatever types they compute in. None without."""
    return None if model._compile_loss is None else model._compile_loss(targets, predictions, weights)


def loss_trackers(model: Any) -> list[Any]:
    """Return the metrics that average the loss of each output of several, and count batches."""
    return list(model._compile_loss.metrics) if model._compile_loss is not None else []


def loss_of(model: Any) -> float:
    """Return the mean loss of the batches since `reset_metrics`. `get_metrics_result` lacks it in a step."""
    return float(model._loss_tracker.result())


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return what the model was compiled with, not serialized, by compile()'s arguments. {} if it was not."""
    compiled = getattr(model, "_compile_config", None)
    return dict(compiled.config) if model.compiled and compiled is not None else {}


@contextlib.contextmanager
def noting_divisors(divisors: dict[Any, tuple[Any, ...]]) -> Iterator[None]:
    """Note what Keras divides each loss by: unmasked elements, the sum of the weights, or samples.

    `divisors` gets a key for each different divisor, and the divisor, None for samples. Then the weights and
    the mask: while they are alive, no other object has their ids. Weights (n,) apply to all elements of a
    sample, like weights (n, 1) in fit.
    """
    module, ops = keras.src.losses.loss, keras.ops
    original = module.reduce_weighted_values

    def reduce(values: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
        is_weighed = sample_weight is not None and reduction == "mean_with_sample_weight"
        given = sample_weight if is_weighed else None, mask
        if sample_weight is not None:
            sample_weight = ops.cast(sample_weight, values.dtype)
            if len(sample_weight.shape) == 1 < len(values.shape):
                sample_weight = ops.reshape(sample_weight, (-1, *[1] * (len(values.shape) - 1)))
        counted = module.apply_mask(sample_weight if is_weighed else None, mask, "float32", "sum")
        divisor = None if counted is None else ops.sum(counted)
        divisors.setdefault(tuple(map(id, given)), (divisor, *given))
        return original(values, sample_weight, mask, reduction, dtype)

    with mock.patch.object(module, "reduce_weighted_values", reduce):
        yield


def keras_mask(tensor: Any) -> Any:
    """Return the mask of a prediction, whose elements the loss leaves out, or None."""
    return getattr(tensor, "_keras_mask", None)


def run_symbolically(code: Any, *symbols: Any) -> None:
    """Run `code` on symbolic tensors, as Keras does to create the state of losses and metrics."""
    keras.src.backend.compute_output_spec(code, *symbols)


def build_symbolically(model: Any, data: Any) -> None:
    """Create the state of losses and metrics of compile(), given a batch of symbolic tensors.

    Nothing is created for a model without call(), which may have its own train_step. Nor is the optimizer
    built, which fit does in the first step: train_step may train layers that call() does not use.
    """
    with contextlib.suppress(Exception), mock.patch.object(model, "optimizer", None):
        model._symbolic_build(data_batch=data)


def find_optimizers(model: Any) -> list[Any]:
    """Return the optimizers that a train_step uses: global ones that it names, else attributes of `model`."""
    for values in (find_globals(model), vars(model).values()):
        if optimizers := [value for value in values if isinstance(value, keras.optimizers.Optimizer)]:
            unlike_default = [value for value in optimizers if value is not getattr(model, "optimizer", None)]
            # A compile() of the user that calls Keras' without an optimizer leaves the default, RMSprop.
            has_compile = type(model).compile is not keras.Model.compile
            code = getattr(_python_function(model.train_step), "__code__", None)
            if unlike_default and has_compile and "optimizer" not in (code.co_names if code else ()):
                optimizers = unlike_default
            return list({id(optimizer): optimizer for optimizer in optimizers}.values())
    return []


def find_globals(model: Any) -> list[Any]:
    """Return the global values whose names occur in the code of train_step and of the functions it uses.

    Only functions of its file are followed. Names of attributes occur, too: a global value of the same name
    is returned, even if it is not used.
    """
    values: dict[int, Any] = {}
    waiting = [model.train_step]
    while waiting:
        function = _python_function(waiting.pop())
        for name in function.__code__.co_names if inspect.isfunction(function) else ():
            value = function.__globals__.get(name)
            if id(value) not in values:
                values[id(value)] = value
                is_beside = getattr(value, "__module__", None) == function.__module__
                waiting += [value] if is_beside and not inspect.isclass(value) else []
    return list(values.values())


def _python_function(step: Any) -> Any:
    function = getattr(step, "__func__", step)
    return getattr(function, "python_function", function)


def optimizer_classes() -> list[Any]:
    """Return the base class of Keras' optimizers and all of its subclasses, the user's included."""
    classes: dict[Any, None] = {}
    waiting = [keras.src.optimizers.base_optimizer.BaseOptimizer]
    while waiting:
        kind = waiting.pop()
        classes[kind] = None
        waiting += kind.__subclasses__()
    return list(classes)


def trained_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for: those that `apply` takes by default."""
    return list(optimizer._trainable_variables)


def averages_of_variables(optimizer: Any) -> list[Any]:
    """Return the moving averages of `trained_variables`, of an optimizer with `use_ema`."""
    return list(optimizer._model_variables_moving_average)


def constant_rate(optimizer: Any) -> float:
    """Return the learning rate of an optimizer. 0 if it follows a schedule of its own."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    is_constant = hasattr(getattr(optimizer, "_learning_rate", None), "assign")
    return float(optimizer.learning_rate) if is_constant else 0.0


def copy_decay_exclusions(optimizer: Any, other_optimizer: Any) -> Any:
    """Return `optimizer` with the other's weight-decay exclusions, which get_config() omits."""
    rules = {k: v for k, v in vars(other_optimizer).items() if k.startswith("_exclude_from_weight")}
    vars(optimizer).update(rules)
    return optimizer


def functional_graph(model: Any) -> Any:
    """Return the functional model that a sequential model wraps, or else the model."""
    return getattr(model, "_functional", None) or model


def has_graph(operation: Any) -> bool:
    """Return whether a model or layer is a functional or sequential model."""
    return hasattr(functional_graph(operation), "_nodes_by_depth")


def nested_graph(operation: Any) -> Any:
    """Return the graph of a layer that is a plain model with one input and one output, else None."""
    graph = functional_graph(operation) if _calls_graph(operation) else None
    return graph if graph is not None and len(graph.inputs) == len(graph.outputs) == 1 else None


def has_default_forward_and_loss(model: Any) -> bool:
    """Return whether a model has the call, loss and metrics of Keras, which a user's class may override."""
    kind, plain = type(model), keras.Model
    return (
        _calls_graph(model)
        and kind.compute_loss is plain.compute_loss
        and kind.compute_metrics is plain.compute_metrics
    )


def _calls_graph(operation: Any) -> bool:
    call = getattr(type(operation), "call", None)
    return call in (keras.src.models.Functional.call, keras.Sequential.call)


def topological_nodes(model: Any) -> list[tuple[Any, Any]]:
    """Return the operations of a functional or sequential model with their nodes, inputs first."""
    nodes_by_depth = functional_graph(model)._nodes_by_depth
    return [
        (node.operation, node)
        for depth in sorted(nodes_by_depth, reverse=True)
        for node in nodes_by_depth[depth]
    ]
