"""A compiled model from a recipe and a model, whose own compile() gives what the recipe leaves out.

The compiled model carries loss, optimizer and metrics to the ranks in its architecture JSON, which Keras
serializes. The optimizer's learning rate is set by csdctl in every step: scaled by the global batch, warmed
up, capped and decayed.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from csdctl.worker.compute.backend import keras
from csdctl.worker.compute.cuts import freeze_until
from csdctl.worker.compute.keras_internals import compile_arguments, excluding_alike, flatten_layers
from csdctl.worker.compute.user_code import load_function
from csdctl.worker.process.errors import InputError, WorkerError, describe
from csdctl.worker.protocol.recipe import Argument, LossTerm, Recipe

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def compile_model(model: Any, recipe: Recipe) -> Recipe:
    """Compile `model` for training by `recipe`. Return the recipe, completed by the model's own compile().

    Raises WorkerError, exit code 2, if Keras has no such loss, optimizer, schedule or metric, or if what the
    model was compiled with cannot be summed over ranks.
    """
    if (last := recipe.freeze_until) and not freeze_until(model, last):
        known = ", ".join(layer.name for layer in flatten_layers(model)[-5:])
        raise InputError(
            f"recipe.freeze.until names {last}, which is not a layer of {model.name}",
            f"one of its layers, such as {known}",
        )
    own = compile_arguments(model)
    optimizer, recipe = _choose_optimizer(recipe, own.get("optimizer"))
    loss, weights = _choose_loss(recipe, own, model)
    metrics: Any = [make_metric(name) for name in recipe.metrics]
    weighted: Any = None
    if not recipe.metrics:
        metrics, weighted = own.get("metrics"), own.get("weighted_metrics")
        if not own and _is_classifier(loss, model):
            metrics = ["accuracy"]
    with _making("the model cannot be compiled", "loss and recipe.metrics"):
        _compile(
            model,
            optimizer=optimizer,
            loss=loss,
            loss_weights=weights,
            metrics=metrics,
            weighted_metrics=weighted,
        )
    return recipe


def _compile(model: Any, **arguments: Any) -> None:
    """Call compile() of the model, or that of Keras if the user's own takes other arguments."""
    compiling = type(model).compile
    try:
        inspect.signature(compiling).bind(model, **arguments)
    except TypeError:
        compiling = keras.Model.compile
    compiling(model, **arguments)


def _choose_optimizer(recipe: Recipe, own: Any) -> tuple[Any, Recipe]:
    """Return the optimizer, and the recipe with its name, learning rate and schedule."""
    if isinstance(own, str):
        own = keras.optimizers.get(own)
    if recipe.optimizer or own is None:
        name = recipe.optimizer or "sgd"
        config: dict[str, Any] = {"learning_rate": None, **recipe.optimizer_args}
    else:
        own = getattr(own, "inner_optimizer", own)  # compile() wraps it again, if the model needs that
        config = own.get_config() | recipe.optimizer_args
        name = type(own).__name__
    schedule = recipe.schedule
    rate = config["learning_rate"]
    if isinstance(rate, dict):  # a schedule; it belongs to the model's own optimizer
        if recipe.learning_rate is None and not schedule:
            _check_schedule(rate)
            schedule = json.dumps(rate, sort_keys=True)
        rate = None
    if schedule:
        rate = float(make_schedule(schedule)(0))
    if recipe.learning_rate is not None:
        rate = recipe.learning_rate
    if rate is None:
        raise InputError(
            "recipe.learning_rate is missing, and the model is not compiled with an optimizer",
            "compile the model, or set recipe.learning_rate (learning_rate=… in Python)",
        )
    config["learning_rate"] = float(rate)
    recipe = dataclasses.replace(recipe, optimizer=name, learning_rate=float(rate), schedule=schedule)
    if own is not None and name == type(own).__name__:
        return excluding_alike(type(own).from_config(config), own), recipe
    with _making(f"optimizer {name!r} with {config} cannot be created", "optimizer"):
        optimizer = keras.optimizers.get({"class_name": name, "config": config})
        if type(optimizer) is keras.optimizers.Optimizer:
            raise ValueError("it is the base class of optimizers, not an optimizer")
    return optimizer, recipe


def _check_schedule(config: dict[str, Any]) -> None:
    """Raise WorkerError for a schedule of the user's own: ranks make it from what Keras provides."""
    if not str(config.get("module")).startswith("keras"):
        raise InputError(
            f"the model's learning-rate schedule, {config.get('class_name')}, is not a Keras schedule",
            "use one of keras.optimizers.schedules, or recipe.warmup_epochs and recipe.decay",
        )


@contextmanager
def _making(what: str, key: str) -> Iterator[None]:
    """Turn whatever Keras or the user's code raises into a WorkerError that names what cannot be made."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {describe(error)}", f"fix recipe.{key} in job.yaml") from None


def make_schedule(schedule: str) -> Callable[[int], Any]:
    """Return the learning rate by step that the JSON `schedule` describes. Raises WorkerError."""
    with _making(f"learning-rate schedule {schedule} cannot be created", "schedule"):
        made: Callable[[int], Any] = keras.optimizers.schedules.deserialize(json.loads(schedule))
        return made


def _choose_loss(recipe: Recipe, own: dict[str, Any], model: Any) -> tuple[Any, Any]:
    """Return loss and loss weights as compile() takes them."""
    if recipe.losses:
        terms = recipe.losses
    elif own:  # without a loss, if its layers add their own
        if getattr(model.train_step, "__func__", None) is keras.Model.train_step:
            _check_reductions(own.get("loss"))
        return own.get("loss"), own.get("loss_weights")
    else:
        terms = {"": LossTerm("sparse_categorical_crossentropy")}
    if "" in terms:
        return make_loss(terms[""], recipe.from_logits), terms[""].weight
    names = list(getattr(model, "output_names", None) or terms)
    if unknown := sorted(set(terms) - set(names)):
        raise InputError(
            f"recipe.loss names {', '.join(unknown)}, the model's outputs are {', '.join(names)}",
            "fix recipe.loss in job.yaml",
        )
    losses = {name: make_loss(terms[name], recipe.from_logits) if name in terms else None for name in names}
    return losses, {name: terms[name].weight if name in terms else 0.0 for name in names}


def make_loss(term: LossTerm, from_logits: bool) -> Any:
    """Return the loss by its Keras name (`mean_squared_error` or `MeanSquaredError`) or `FILE.py:NAME`.

    Raises WorkerError if there is none, or it does not take these arguments.
    """
    with _making(f"loss {term.name!r} cannot be created", "loss"):
        kind = load_function(term.name) if is_own(term.name) else _loss_class(term.name)
        if isinstance(kind, type) and issubclass(kind, keras.losses.Loss):
            logits: dict[str, Argument] = {"from_logits": True} if from_logits else {}
            loss = kind(**({} if is_own(term.name) else logits) | term.args)
            _check_reductions(loss)
            return loss
        if term.args:
            raise ValueError("it is a function, which takes no arguments of the recipe")
        return kind


def _loss_class(name: str) -> Any:
    """Return the class of Keras' loss `name`. Raises ValueError if Keras has none."""
    found = keras.losses.get(name)
    if isinstance(found, keras.losses.Loss):
        return type(found)
    wanted = found.__name__.replace("_", "")  # of a function, whatever abbreviation it was found by
    return next(
        kind for key, kind in vars(keras.losses).items() if isinstance(kind, type) and key.lower() == wanted
    )


def _check_reductions(losses: Any) -> None:
    """Raise WorkerError for a loss that is not a mean: its scale would depend on the ranks' batches."""
    for loss in keras.tree.flatten(losses):
        if getattr(loss, "reduction", "mean") not in MEANS:
            raise InputError(
                f"loss {name_of(loss)} has reduction={loss.reduction!r}, which depends on the batch size",
                'use reduction="sum_over_batch_size", Keras\' default',
            )


def _is_classifier(loss: Any, model: Any) -> bool:
    """Return whether one of several classes is predicted, as far as that is known."""
    if isinstance(loss, dict) or "crossentropy" not in name_of(loss).lower():
        return False
    shapes = [tuple(tensor.shape) for tensor in getattr(model, "outputs", None) or ()]
    return not shapes or (len(shapes) == 1 and (shapes[0][-1] or 0) > 1)


def name_of(loss: Any) -> str:
    """Return the name of a loss as compile() takes it, such as 'mean_squared_error'. '' without one."""
    return loss if isinstance(loss, str) else str(getattr(loss, "name", "") or getattr(loss, "__name__", ""))


def is_own(name: str) -> bool:
    """Return whether a loss or metric of the recipe is the user's own, `FILE.py:NAME`."""
    return name.rpartition(":")[0].endswith(".py")


def make_metric(name: str) -> Any:
    """Return a metric as compile() takes it. Raises WorkerError if there is none."""
    with _making(f"metric {name!r} cannot be used", "metrics"):
        if is_own(name):
            found = load_function(name)
            is_class = isinstance(found, type) and issubclass(found, keras.metrics.Metric)
            return found() if is_class else found
        if name in ("accuracy", "acc", "crossentropy", "ce"):
            return name  # compile() chooses by loss and output
        return keras.metrics.get(name)
