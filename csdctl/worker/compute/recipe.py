"""Loss, optimizer and metrics of a recipe, as Keras objects."""

from typing import Any

from csdctl.worker.compute.keras_internals import mean_metric_function
from csdctl.worker.compute.user_code import load_function
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.recipe import Recipe


def make_loss(recipe: Recipe, keras: Any) -> Any:
    """Return the loss by its Keras name (`mean_squared_error` or `MeanSquaredError`), summed over the batch.

    Raises WorkerError if Keras has no such loss.
    """
    wanted = recipe.loss.replace("_", "").lower()
    classes = {
        name.lower(): loss
        for name, loss in vars(keras.losses).items()
        if isinstance(loss, type) and issubclass(loss, keras.losses.Loss) and loss is not keras.losses.Loss
    }
    try:
        arguments = {"from_logits": True} if recipe.from_logits else {}
        return classes[wanted](reduction="sum", **arguments)
    except KeyError:
        problem = "Keras has no such loss"
    except Exception as error:
        problem = describe(error)
    raise WorkerError(
        f"loss {recipe.loss!r} cannot be created: {problem}",
        remedy="fix recipe.loss in job.yaml",
        exit_code=2,
    )


def make_optimizer(recipe: Recipe, keras: Any) -> Any:
    """Return the optimizer by its Keras name; raises WorkerError if Keras has no such optimizer."""
    try:
        optimizer = keras.optimizers.get(
            {
                "class_name": recipe.optimizer,
                "config": {"learning_rate": recipe.learning_rate, **recipe.optimizer_args},
            }
        )
        if type(optimizer) is keras.optimizers.Optimizer:
            raise ValueError("it is the base class of optimizers, not an optimizer")
        return optimizer
    except Exception as error:
        raise WorkerError(
            f"optimizer {recipe.optimizer!r} with {recipe.optimizer_args} cannot be created: "
            f"{describe(error)}",
            remedy="fix recipe.optimizer in job.yaml",
            exit_code=2,
        ) from None


def is_own(metric: str) -> bool:
    """Return whether a metric of the recipe is a user function, `FILE.py:NAME`."""
    return metric.rpartition(":")[0].endswith(".py")


def load_own_metrics(recipe: Recipe) -> dict[str, Any]:
    """Return user functions (labels, predictions) → one value per sample, by name; on the host only.

    Raises WorkerError if a function cannot be loaded.
    """
    own = [metric for metric in recipe.metrics if is_own(metric)]
    return {reference.rpartition(":")[2]: load_function(reference) for reference in own}


def make_metrics(recipe: Recipe, model: Any, keras: Any) -> tuple[tuple[str, ...], list[Any]]:
    """Return the recipe's Keras metrics: names, and functions (labels, predictions) → one value per sample.

    A classifier whose recipe has no metrics gets `accuracy`. Raises WorkerError for a metric that is not a
    mean over samples: its value over all ranks cannot be computed from the values of the ranks.
    """
    names = tuple(name for name in recipe.metrics if not is_own(name))
    if not recipe.metrics and "crossentropy" in recipe.loss.lower() and model.output_shape[-1] > 1:
        names = ("accuracy",)
    return names, [_make_metric(name, recipe, model, keras) for name in names]


def _make_metric(name: str, recipe: Recipe, model: Any, keras: Any) -> Any:
    is_sparse = "sparse" in recipe.loss.lower()
    if name == "accuracy":
        name = "SparseCategoricalAccuracy" if is_sparse else "CategoricalAccuracy"
        if model.output_shape[-1] == 1:
            name = "BinaryAccuracy"
    try:
        metric = keras.metrics.get(name)
        if isinstance(metric, keras.metrics.MeanMetricWrapper):
            function, arguments = mean_metric_function(metric)
            return lambda labels, predictions: function(labels, predictions, **arguments)
        if callable(metric) and not isinstance(metric, keras.metrics.Metric):
            return metric
        problem = "it is not a mean over samples, so ranks cannot add it up"
    except Exception as error:
        problem = describe(error)
    raise WorkerError(
        f"metric {name!r} cannot be used: {problem}", remedy="fix recipe.metrics in job.yaml", exit_code=2
    )
