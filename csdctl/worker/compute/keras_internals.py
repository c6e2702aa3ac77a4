"""Every private attribute of Keras that csdctl uses, and why; the cap on Keras in pyproject.toml points here.

- `Layer._flatten_layers`: all layers, including those of nested models and wrapped layers. `Model.layers` has
  the top level only.
- `Layer._non_trainable_variables`: the state that a layer itself keeps. `non_trainable_variables` includes
  that of sublayers, and frozen weights.
- `Layer._seed_generators`: the random states of dropout and augmentation layers. There is no public list, and
  layers keep them under different names.
- `Layer._get_regularization_losses`: penalties on weights alone. `losses` mixes them with activity losses.
- `MeanMetricWrapper._fn` and `_fn_kwargs`: the value of a metric for each sample. The public interface
  returns means only.

Written for Keras 3.15; the tests in tests/unit/worker/compute cover every use.
"""

from typing import Any


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


def mean_metric_function(metric: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function (labels, predictions) that a MeanMetricWrapper averages, and its keyword args."""
    return metric._fn, dict(getattr(metric, "_fn_kwargs", {}))
