"""What a model brings to a job: its own compile(), layers that scale its inputs, the smallest embedding."""

from typing import Any

from csdctl.worker.compute.keras_internals import compile_arguments, flatten_layers
from csdctl.worker.protocol.model_info import OwnCompile


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
