"""Decisions between epochs: early stopping, reduce on plateau, the best model. Pure.

Rank 0 decides from its evaluation. The other ranks take over the decision.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from csdctl.worker.process.errors import JobError
from csdctl.worker.protocol.recipe import EarlyStopping, Recipe, ReduceOnPlateau
from csdctl.worker.tasks.progress import CallbackState

HIGHER_IS_BETTER = (
    *("accuracy", "auc", "similarity", "precision", "recall", "iou", "r2", "f1", "fbeta", "correlation"),
    *("sensitivity", "specificity", "true_", "dice", "psnr", "ssim"),
)


def is_higher_better(monitor: str, mode: str = "auto") -> bool:
    """Whether larger values of this metric are better, as for accuracies and unlike losses."""
    name = monitor.lower()
    return mode == "max" or (
        mode == "auto" and (name.endswith("acc") or any(word in name for word in HIGHER_IS_BETTER))
    )


def check_monitors(recipe: Recipe, metrics: Iterable[str]) -> None:
    """Raise WorkerError for a metric that no epoch will have: it would count as one that never improves.

    `metrics`: the names of the model's.
    """
    names = dict.fromkeys(["loss", *metrics])
    results = [*names, *(f"validation_{name}" for name in names)]
    for key, monitored in (
        ("early_stopping", recipe.early_stopping),
        ("reduce_on_plateau", recipe.reduce_on_plateau),
    ):
        if monitored and monitored.monitor not in results:
            raise JobError(
                f"recipe.{key} monitors {monitored.monitor!r}, which is not among the results of an epoch",
                f"one of {', '.join(results)}",
            )


def after_epoch(
    recipe: Recipe, before: CallbackState, epoch: int, results: Mapping[str, float | None]
) -> tuple[CallbackState, bool]:
    """Return the callbacks' state after `epoch`, and whether its model is the best so far.

    `results` are the epoch's loss and metrics. Results on the validation data start with `validation_`. The
    best model has the best monitored value of early stopping, else the lowest validation loss, else (without
    validation data) the lowest training loss.
    """
    now, is_best = _after_epoch(recipe.early_stopping, before, epoch, results)
    return (_on_plateau(recipe.reduce_on_plateau, now, results) if recipe.reduce_on_plateau else now), is_best


def _after_epoch(
    stopping: EarlyStopping | None, now: CallbackState, epoch: int, results: Mapping[str, float | None]
) -> tuple[CallbackState, bool]:
    rule = stopping or EarlyStopping()
    if epoch <= rule.start_from_epoch:
        return now, False
    value = _value(results, rule.monitor)
    is_best = value is not None and _is_gain(value, now.best, rule)
    if is_best:
        now = replace(now, best=value, best_epoch=epoch)
        if rule.baseline is None or (value is not None and _is_gain(value, rule.baseline, rule)):
            return replace(now, epochs_without_gain=0), True
    now = replace(now, epochs_without_gain=now.epochs_without_gain + 1)
    is_stopping = stopping is not None and not is_best and now.epochs_without_gain >= rule.patience
    return replace(now, is_stopping=is_stopping), is_best


def _on_plateau(
    rule: ReduceOnPlateau, now: CallbackState, results: Mapping[str, float | None]
) -> CallbackState:
    value = _value(results, rule.monitor)
    if now.cooldown:
        now = replace(now, cooldown=now.cooldown - 1, epochs_on_plateau=0)
    if value is not None and _is_gain(value, now.plateau_best, rule):
        return replace(now, plateau_best=value, epochs_on_plateau=0)
    if now.cooldown:
        return now
    now = replace(now, epochs_on_plateau=now.epochs_on_plateau + 1)
    if now.epochs_on_plateau < rule.patience:
        return now
    factor = max(rule.min_factor, now.rate_factor * rule.factor)
    return replace(now, rate_factor=factor, epochs_on_plateau=0, cooldown=rule.cooldown)


def _value(results: Mapping[str, float | None], monitor: str) -> float | None:
    value = results.get(monitor)
    if value is None:  # without validation data
        value = results.get(monitor.removeprefix("validation_"))
    return value if value is not None and math.isfinite(value) else None


def _is_gain(value: float, best: float | None, rule: EarlyStopping | ReduceOnPlateau) -> bool:
    if best is None:
        return True
    gain = value - best if is_higher_better(rule.monitor, rule.mode) else best - value
    return gain > rule.min_delta


Decision = tuple[CallbackState, bool]
"""The callbacks' new state, and whether this epoch's model is the best so far."""
