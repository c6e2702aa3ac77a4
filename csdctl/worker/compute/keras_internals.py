"""Every private attribute of Keras that csdctl uses, and why; the cap on Keras in pyproject.toml points here.

- `Layer._flatten_layers`: all layers, including those of nested models and wrapped layers. `Model.layers` has
  the top level only.
- `Layer._non_trainable_variables`: the state that a layer itself keeps. `non_trainable_variables` includes
  that of sublayers, and frozen weights.
- `Layer._seed_generators`: the random states of dropout and augmentation layers. There is no public list, and
  layers keep them under different names.
- `Layer._get_regularization_losses`: penalties on weights alone. `losses` mixes them with activity losses.
- `keras.src.backend.compute_output_spec`: runs code on symbolic tensors, as Keras does itself to create the
  state of losses and metrics before the first batch.
- `Model._compile_config`: the arguments of compile() as given. `get_compile_config` serializes them, which
  fails for losses that are not at the top level of a module.
- `Model._compile_loss`: the loss of compile() alone. `compute_loss` cannot add the losses of layers to it
  when these compute in 16 bits.
- `Model._compile_loss._flat_losses`: the loss objects of compile(), which it makes of functions. Their values
  before the mean say whether the loss of a sample depends on the others in the batch.
- `Model._compile_loss.metrics`: the means of each output's loss. They count batches, not samples, when the
  size of a batch is not known beforehand.
- `tensor._keras_mask`: which elements of a prediction the loss leaves out.
- `MeanMetricWrapper._fn`: the function of a metric that is a mean. A user's own may return one number for a
  batch, those of Keras do not.
- `Function._nodes_by_depth`: the graph of a functional model, and `Sequential._functional`, which has that of
  a sequential one. The public list of layers does not say which tensors go where.
- `keras.src.models.functional.Functional`: whether a model that is a layer of another computes its graph and
  nothing else.
- `global_seed_generator`: the random state of layers that draw without a seed generator of their own.

Written for Keras 3.15; the tests in tests/unit/worker/compute cover every use.
"""

from typing import Any

from csdctl.worker.protocol.model_info import OwnCompile


def flatten_layers(model: Any) -> list[Any]:
    """Return the layers of `model` and of models nested in it, each once, in a fixed order."""
    layers = model._flatten_layers(include_self=False, recursive=True)
    return [layer for layer in layers if layer is not model]


def own_state(layer: Any) -> list[Any]:
    """Return the non-trainable variables that `layer` itself owns, without those of its sublayers."""
    return list(layer._non_trainable_variables)


def seed_generators(model: Any) -> list[tuple[str, Any]]:
    """Return the seed generators of `model` and its layers, with the layers' names, in a fixed order."""
    return [
        (layer.name, generator)
        for layer in (*flatten_layers(model), model)
        for generator in getattr(layer, "_seed_generators", ())
    ]


def regularization_losses(model: Any) -> list[Any]:
    """Return the penalties on the weights of `model`; they come last in `model.losses`."""
    return list(model._get_regularization_losses())


def run_symbolically(code: Any, *symbols: Any) -> None:
    """Run `code` on symbolic tensors, which creates the variables of losses and metrics that it uses."""
    from keras.src.backend import compute_output_spec

    compute_output_spec(code, *symbols)


def compiled_loss(model: Any, targets: Any, predictions: Any, weights: Any) -> Any:
    """Return the loss of compile() without what layers add; None if the model was compiled without one."""
    return None if model._compile_loss is None else model._compile_loss(targets, predictions, weights)


def compiled_losses(model: Any) -> list[Any]:
    """Return the loss objects of compile(), once the model's loss was computed."""
    return [] if model._compile_loss is None else [loss for _, loss, _, _ in model._compile_loss._flat_losses]


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return what the model was compiled with, by the names of compile()'s arguments; {} if it was not."""
    compiled = getattr(model, "_compile_config", None)
    return dict(compiled.config) if model.compiled and compiled is not None else {}


def loss_trackers(model: Any) -> list[Any]:
    """Return the metrics that average the loss of each output; those of one output have none."""
    return list(model._compile_loss.metrics) if model._compile_loss is not None else []


def metric_function(metric: Any) -> Any:
    """Return the function whose values a metric averages; None for other metrics."""
    return getattr(metric, "_fn", None)


def keras_mask(tensor: Any) -> Any:
    """Return the mask of a prediction, or None."""
    return getattr(tensor, "_keras_mask", None)


def global_seed_generator() -> Any:
    """Return the generator that random operations without one of their own use."""
    from keras.src.random.seed_generator import global_seed_generator as get

    return get()


def nested_graph(operation: Any) -> Any:
    """Return the graph of a model with one input and one output that is a layer of another; None for others.

    A class of the user's own may compute more than its graph.
    """
    from keras.src.models.functional import Functional
    from keras.src.models.sequential import Sequential

    call = getattr(type(operation), "call", None)
    graph = operation if call is Functional.call else None
    if call is Sequential.call:
        graph = operation._functional
    return graph if graph is not None and len(graph.inputs) == len(graph.outputs) == 1 else None


def topological_nodes(model: Any) -> list[tuple[Any, Any]]:
    """Return the operations of a functional or sequential model with their nodes, inputs first."""
    graph = getattr(model, "_functional", None) or model
    return [
        (node.operation, node)
        for depth in sorted(graph._nodes_by_depth, reverse=True)
        for node in graph._nodes_by_depth[depth]
    ]


def describe_compile(model: Any, keras: Any) -> OwnCompile | None:
    """Return what `model` was compiled with, None if it was not."""
    own = compile_arguments(model)
    if not own:
        return None
    has_loss = own.get("loss") is not None
    metrics = tuple(_names([own.get("metrics"), own.get("weighted_metrics")]))
    optimizer = keras.optimizers.get(own.get("optimizer"))
    if optimizer is None:
        return OwnCompile("", 0.0, "", has_loss, metrics)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a model with float16
    rate, schedule = optimizer.get_config()["learning_rate"], ""
    if isinstance(rate, dict):
        schedule = str(rate.get("class_name", ""))
        rate = optimizer.learning_rate  # the first
    rate = float(f"{float(rate):.7g}")  # as it was written: Keras keeps a float32
    return OwnCompile(type(optimizer).__name__, rate, schedule, has_loss, metrics)


def find_scaling_layers(model: Any, keras: Any) -> tuple[str, ...]:
    """Return the layers of `model`, and of models in it, that scale what they are given."""
    kinds = (keras.layers.Rescaling, keras.layers.Normalization)
    found = (layer for layer in flatten_layers(model) if isinstance(layer, kinds))
    return tuple(f"{layer.name} ({type(layer).__name__})" for layer in found)


def _names(metrics: Any) -> list[str]:
    """Return the names of metrics as compile() takes them: one, several, or by output."""
    if metrics is None:
        return []
    if isinstance(metrics, dict):
        return [name for part in metrics.values() for name in _names(part)]
    if isinstance(metrics, list | tuple):
        return [name for part in metrics for name in _names(part)]
    return [metrics if isinstance(metrics, str) else getattr(metrics, "name", None) or metrics.__name__]


def find_smallest_embedding(model: Any) -> int | None:
    """Return the size of the smallest embedding, beyond which an integer may be an error; None without."""
    sizes = (
        getattr(layer, "input_dim", None)
        for layer in flatten_layers(model)
        if type(layer).__name__.endswith("Embedding")
    )
    return min((size for size in sizes if isinstance(size, int)), default=None)
