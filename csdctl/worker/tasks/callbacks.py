"""Decisions between epochs: early stopping, reduce on plateau, the best model; pure.

Rank 0 decides from its evaluation; the other ranks take over the decision.
"""

import dataclasses
import math
from collections.abc import Mapping

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.tasks.position import CallbackState

HIGHER_IS_BETTER = ("accuracy", "auc", "similarity", "precision", "recall", "iou", "r2")


def is_higher_better(monitor: str) -> bool:
    """Whether larger values of this metric are better, as for accuracies and unlike losses."""
    return any(word in monitor.lower() for word in HIGHER_IS_BETTER)


def after_epoch(
    recipe: Recipe, before: CallbackState, epoch: int, results: Mapping[str, float | None]
) -> tuple[CallbackState, bool]:
    """Return the callbacks' state after `epoch`, and whether its model is the best so far.

    `results` are the epoch's loss and metrics; those of the validation data start with `validation_`. The
    best model is that with the best monitored value of early stopping, else with the lowest validation
    loss, else (without validation data) with the lowest training loss.

    Raises WorkerError when a callback monitors what the run does not have.
    """
    stopping, plateau = recipe.early_stopping, recipe.reduce_on_plateau
    for name, monitored in (("early_stopping", stopping), ("reduce_on_plateau", plateau)):
        if monitored:
            _check_monitor(name, monitored.monitor, results)
    monitor = stopping.monitor if stopping else "validation_loss"
    value = _value(results, monitor)
    is_best = value is not None and _is_gain(
        value, before.best, monitor, stopping.min_delta if stopping else 0.0
    )
    now = before
    if is_best:
        now = dataclasses.replace(now, best=value, best_epoch=epoch, epochs_without_gain=0)
    else:
        now = dataclasses.replace(now, epochs_without_gain=before.epochs_without_gain + 1)
    if stopping and now.epochs_without_gain >= stopping.patience:
        now = dataclasses.replace(now, is_stopping=True)
    if plateau:
        value = _value(results, plateau.monitor)
        if value is not None and _is_gain(value, before.plateau_best, plateau.monitor, plateau.min_delta):
            now = dataclasses.replace(now, plateau_best=value, epochs_on_plateau=0)
        else:
            now = dataclasses.replace(now, epochs_on_plateau=before.epochs_on_plateau + 1)
        if now.epochs_on_plateau >= plateau.patience:
            factor = max(plateau.min_factor, now.rate_factor * plateau.factor)
            now = dataclasses.replace(now, rate_factor=factor, epochs_on_plateau=0)
    return now, is_best


def _check_monitor(name: str, monitor: str, results: Mapping[str, float | None]) -> None:
    """Raise WorkerError for a metric that does not exist: it would count as one that never improves."""
    if not {monitor, monitor.removeprefix("validation_")} & results.keys():
        raise WorkerError(
            f"recipe.{name} monitors {monitor!r}, which is not among the results of an epoch",
            remedy=f"one of {', '.join(results)}",
        )


def _value(results: Mapping[str, float | None], monitor: str) -> float | None:
    value = results.get(monitor)
    if value is None:  # without validation data
        value = results.get(monitor.removeprefix("validation_"))
    return value if value is not None and math.isfinite(value) else None


def _is_gain(value: float, best: float | None, monitor: str, min_delta: float) -> bool:
    if best is None:
        return True
    gain = value - best if is_higher_better(monitor) else best - value
    return gain > min_delta
