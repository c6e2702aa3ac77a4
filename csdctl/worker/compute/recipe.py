"""A compiled model from a recipe and a model, whose own compile() gives what the recipe leaves out.

The compiled model carries loss, optimizer and metrics to the ranks in its architecture JSON. The learning
rate is set by csdctl in every step.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable
from typing import Any

from csdctl.worker.compute.backend import keras
from csdctl.worker.compute.cuts import freeze_until
from csdctl.worker.compute.keras_internals import compile_arguments, copy_decay_exclusions, flatten_layers
from csdctl.worker.compute.user_code import explaining, load_function
from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.recipe import LossTerm, Recipe

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
"""Reductions of a loss that do not depend on the size of the batch."""


def compile_model(model: Any, recipe: Recipe) -> Recipe:
    """Compile `model` for training by `recipe`. Return the recipe, completed by the model's own compile().

    Raises WorkerError, exit code 2, if Keras has no such loss, optimizer, schedule or metric, or if what the
    model was compiled with cannot be summed over ranks.
    """
    if (last := recipe.freeze_until) and not freeze_until(model, last):
        names = ", ".join(layer.name for layer in flatten_layers(model)[-5:])
        raise JobError(
            f"recipe.freeze.until names {last}, which is not a layer of {model.name}",
            f"one of its layers, such as {names}",
        )
    compiled = compile_arguments(model)
    optimizer, recipe = _choose_optimizer(recipe, compiled.get("optimizer"))
    loss, weights = _choose_loss(recipe, compiled, model)
    metrics: Any = [make_metric(name) for name in recipe.metrics] or compiled.get("metrics")
    if not recipe.metrics and not compiled and _is_classifier(loss, model):
        metrics = ["accuracy"]
    arguments = {
        "optimizer": optimizer,
        "loss": loss,
        "loss_weights": weights,
        "metrics": metrics,
        "weighted_metrics": None if recipe.metrics else compiled.get("weighted_metrics"),
    }
    with explaining("the model cannot be compiled", "fix recipe.loss and recipe.metrics in job.yaml"):
        compile_method = type(model).compile
        try:
            inspect.signature(compile_method).bind(model, **arguments)
        except TypeError:  # the user's compile() takes other arguments
            compile_method = keras.Model.compile
        compile_method(model, **arguments)
    return recipe


def _choose_optimizer(recipe: Recipe, compiled: Any) -> tuple[Any, Recipe]:
    """Return the optimizer, and the recipe with what `compiled`, an optimizer or its name, adds to it."""
    if isinstance(compiled, str):
        compiled = keras.optimizers.get(compiled)
    if recipe.optimizer or compiled is None:
        name = recipe.optimizer or "sgd"
        config: dict[str, Any] = {"learning_rate": None, **recipe.optimizer_args}
    else:
        compiled = getattr(compiled, "inner_optimizer", compiled)  # compile() wraps it again, if needed
        config = compiled.get_config() | recipe.optimizer_args
        name = type(compiled).__name__
    schedule = recipe.schedule
    rate = config["learning_rate"]
    if isinstance(rate, dict):  # a schedule; it belongs to the model's own optimizer
        if recipe.learning_rate is None and not schedule:
            schedule = _serialize_schedule(rate)
        rate = None
    if schedule:
        rate = float(make_schedule(schedule)(0))
    if recipe.learning_rate is not None:
        rate = recipe.learning_rate
    if rate is None:
        raise JobError(
            "recipe.learning_rate is missing, and the model is not compiled with an optimizer",
            "compile the model, or set recipe.learning_rate (learning_rate=… in Python)",
        )
    config["learning_rate"] = float(rate)
    recipe = dataclasses.replace(recipe, optimizer=name, learning_rate=float(rate), schedule=schedule)
    if compiled is not None and name == type(compiled).__name__:
        return copy_decay_exclusions(type(compiled).from_config(config), compiled), recipe
    with explaining(
        f"optimizer {name!r} with {config} cannot be created", "fix recipe.optimizer in job.yaml"
    ):
        optimizer = keras.optimizers.get({"class_name": name, "config": config})
        if type(optimizer) is keras.optimizers.Optimizer:
            raise ValueError("it is the base class of optimizers, not an optimizer")
    return optimizer, recipe


def _serialize_schedule(config: dict[str, Any]) -> str:
    """Return a schedule's configuration as JSON. Raises WorkerError if it needs the user's code."""
    if not str(config.get("module")).startswith("keras"):
        raise JobError(
            f"the model's learning-rate schedule, {config.get('class_name')}, is not a Keras schedule",
            "use one of keras.optimizers.schedules, or recipe.warmup_epochs and recipe.decay",
        )
    return json.dumps(config, sort_keys=True)


def make_schedule(schedule: str) -> Callable[[int], Any]:
    """Return the learning rate by step that the JSON `schedule` describes. Raises WorkerError."""
    with explaining(
        f"learning-rate schedule {schedule} cannot be created", "fix recipe.schedule in job.yaml"
    ):
        rate_of: Callable[[int], Any] = keras.optimizers.schedules.deserialize(json.loads(schedule))
        return rate_of


def _choose_loss(recipe: Recipe, compiled: dict[str, Any], model: Any) -> tuple[Any, Any]:
    if compiled and not recipe.losses:  # without a loss, if its layers add their own
        if getattr(model.train_step, "__func__", None) is keras.Model.train_step:
            _check_reductions(compiled.get("loss"))
        return compiled.get("loss"), compiled.get("loss_weights")
    terms = recipe.losses or {"": LossTerm("sparse_categorical_crossentropy")}
    if "" in terms:
        return make_loss(terms[""], recipe.from_logits), terms[""].weight
    names = list(getattr(model, "output_names", None) or terms)
    if unknown := sorted(set(terms) - set(names)):
        raise JobError(
            f"recipe.loss names {', '.join(unknown)}, the model's outputs are {', '.join(names)}",
            "fix recipe.loss in job.yaml",
        )
    losses = {name: make_loss(terms[name], recipe.from_logits) if name in terms else None for name in names}
    return losses, {name: terms[name].weight if name in terms else 0.0 for name in names}


def make_loss(term: LossTerm, from_logits: bool) -> Any:
    """Return the loss by its Keras name, in either spelling, or `FILE.py:NAME`. Raises WorkerError."""
    with explaining(f"loss {term.name!r} cannot be created", "fix recipe.loss in job.yaml"):
        kind = load_function(term.name) if is_own(term.name) else _loss_class(term.name)
        if isinstance(kind, type) and issubclass(kind, keras.losses.Loss):
            logits = {"from_logits": True} if from_logits and not is_own(term.name) else {}
            loss = kind(**logits | term.args)
            _check_reductions(loss)
            return loss
        if term.args:
            raise ValueError("it is a function, which takes no arguments of the recipe")
        return kind


def _loss_class(name: str) -> Any:
    loss = keras.losses.get(name)
    if isinstance(loss, keras.losses.Loss):
        return type(loss)
    full_name = loss.__name__.replace("_", "")  # of a function, whatever abbreviation was given
    classes = {key.lower(): kind for key, kind in vars(keras.losses).items() if isinstance(kind, type)}
    return classes[full_name]


def _check_reductions(losses: Any) -> None:
    """Raise WorkerError for a loss that is not a mean: its scale would depend on the ranks' batches."""
    for loss in keras.tree.flatten(losses):
        if getattr(loss, "reduction", "mean") not in MEANS:
            raise JobError(
                f"loss {name_of(loss)} has reduction={loss.reduction!r}, which depends on the batch size",
                'use reduction="sum_over_batch_size", Keras\' default',
            )


def _is_classifier(loss: Any, model: Any) -> bool:
    if isinstance(loss, dict) or "crossentropy" not in name_of(loss).lower():
        return False
    shapes = [tuple(tensor.shape) for tensor in getattr(model, "outputs", None) or ()]
    return not shapes or (len(shapes) == 1 and (shapes[0][-1] or 0) > 1)


def name_of(loss: Any) -> str:
    """Return the name of a loss as compile() takes it, such as 'mean_squared_error'. '' without one."""
    return loss if isinstance(loss, str) else str(getattr(loss, "name", "") or getattr(loss, "__name__", ""))


def is_own(name: str) -> bool:
    """Return whether a loss or metric of the recipe is the user's code, `FILE.py:NAME`."""
    return name.rpartition(":")[0].endswith(".py")


def make_metric(name: str) -> Any:
    """Return a metric as compile() takes it. Raises WorkerError if there is none."""
    with explaining(f"metric {name!r} cannot be used", "fix recipe.metrics in job.yaml"):
        if is_own(name):
            metric = load_function(name)
            is_class = isinstance(metric, type) and issubclass(metric, keras.metrics.Metric)
            return metric() if is_class else metric
        if name in ("accuracy", "acc", "crossentropy", "ce"):
            return name  # compile() chooses by loss and output
        return keras.metrics.get(name)
