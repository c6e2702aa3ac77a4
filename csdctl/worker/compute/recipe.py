"""A recipe's loss and optimizer, as Keras makes them."""

from typing import Any

from csdctl.worker.compute.user_code import load_function
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.recipe import Recipe


def make_loss(recipe: Recipe, keras: Any) -> Any:
    """The loss by its Keras name (`mean_squared_error` or `MeanSquaredError`), summed over the batch.

    Raises WorkerError when Keras has no such loss.
    """
    wanted = recipe.loss.replace("_", "").lower()
    kinds = {
        name.lower(): kind
        for name, kind in vars(keras.losses).items()
        if isinstance(kind, type) and issubclass(kind, keras.losses.Loss) and kind is not keras.losses.Loss
    }
    try:
        arguments = {"from_logits": True} if recipe.from_logits else {}
        return kinds[wanted](reduction="sum", **arguments)
    except KeyError:
        problem = "Keras has no such loss"
    except Exception as error:
        problem = describe(error)
    raise WorkerError(
        f"loss {recipe.loss!r} cannot be made: {problem}", remedy="mend recipe.loss in job.yaml", exit_code=2
    )


def make_optimizer(recipe: Recipe, keras: Any) -> Any:
    """The optimizer by its Keras name; raises WorkerError when Keras has none such."""
    try:
        optimizer = keras.optimizers.get(
            {
                "class_name": recipe.optimizer,
                "config": {"learning_rate": recipe.learning_rate, **recipe.optimizer_args},
            }
        )
        if type(optimizer) is keras.optimizers.Optimizer:
            raise ValueError("it is the base of all optimizers, not one itself")
        return optimizer
    except Exception as error:
        raise WorkerError(
            f"optimizer {recipe.optimizer!r} with {recipe.optimizer_args} cannot be made: {describe(error)}",
            remedy="mend recipe.optimizer in job.yaml",
            exit_code=2,
        ) from None


def is_own(metric: str) -> bool:
    """Whether a metric of the recipe is a function of the user's, `FILE.py:NAME`."""
    return metric.rpartition(":")[0].endswith(".py")


def load_own_metrics(recipe: Recipe) -> dict[str, Any]:
    """The user's functions (labels, predictions) → one value a sample, by name; on the host alone.

    Raises WorkerError when one cannot be loaded.
    """
    return {one.rpartition(":")[2]: load_function(one) for one in recipe.metrics if is_own(one)}


def make_metrics(recipe: Recipe, model: Any, keras: Any) -> tuple[tuple[str, ...], list[Any]]:
    """The recipe's metrics that Keras has: names, and functions (labels, predictions) → one value a sample.

    Without any in the recipe, a classifier has `accuracy`. Raises WorkerError for a metric that is no mean
    over samples: its value over all ranks is not the mean of theirs.
    """
    names = tuple(name for name in recipe.metrics if not is_own(name))
    if not recipe.metrics and "crossentropy" in recipe.loss.lower() and model.output_shape[-1] > 1:
        names = ("accuracy",)
    return names, [_make_metric(name, recipe, model, keras) for name in names]


def _make_metric(name: str, recipe: Recipe, model: Any, keras: Any) -> Any:
    is_sparse = "sparse" in recipe.loss.lower()
    if name == "accuracy":
        kind = "SparseCategoricalAccuracy" if is_sparse else "CategoricalAccuracy"
        if model.output_shape[-1] == 1:
            kind = "BinaryAccuracy"
        name = kind
    try:
        metric = keras.metrics.get(name)
        if isinstance(metric, keras.metrics.MeanMetricWrapper):
            kwargs = dict(getattr(metric, "_fn_kwargs", {}))
            function = metric._fn
            return lambda labels, predictions: function(labels, predictions, **kwargs)
        if callable(metric) and not isinstance(metric, keras.metrics.Metric):
            return metric
        problem = "it is no mean over samples, and cannot be added up over ranks"
    except Exception as error:
        problem = describe(error)
    raise WorkerError(
        f"metric {name!r} cannot be used: {problem}", remedy="mend recipe.metrics in job.yaml", exit_code=2
    )
