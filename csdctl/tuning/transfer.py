"""Guess the step time of a model that was never measured from similar ones; pure.

After "A History-Based Auto-Tuning Framework for Fast and High Performance DNN Design on GPU" (2020): records
of dissimilar models are worse than none, so neighbours are ordered by a distance over their features, and
distant ones are left out. The paper learns the weights of the features; with a handful of records they are
fixed here.

    distance² = Σ_f weight_f · ln(a_f / b_f)²

A model with twice the operations is as far away as one with half of them, and units do not matter.
"""

import math
from collections.abc import Sequence

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.measurements import ModelProperties

WEIGHTS = {"num_operations": 1.0, "num_parameters": 0.5, "num_trainable": 0.5, "input_elements": 0.25}
"""Operations dominate a step; parameters represent the optimizer, the input represents memory traffic."""

UNKNOWN_RATIO = 4.0
"""The assumed ratio of a feature that is known for one model only."""

MAX_DISTANCE = math.log(16)
"""Equivalent to 16 times the operations, all else equal; neighbours beyond it are not used."""

_SOFTENING = 0.01
"""Added to squared distances: the nearest neighbour dominates, but not alone."""


def feature_distance(first: ModelProperties, second: ModelProperties) -> float:
    """Return the distance of two models: at least 0, symmetric, 0 for equal features.

    A feature that is unknown (0) for both is ignored.
    """
    return math.sqrt(
        sum(
            weight * _log_ratio(getattr(first, name), getattr(second, name)) ** 2
            for name, weight in WEIGHTS.items()
        )
    )


def transfer_step_time(
    target: ModelProperties, known: Sequence[tuple[ModelProperties, StepTime]]
) -> StepTime | None:
    """Guess the step time of `target` from other models on the same machine; None when none is similar.

    The time per sample scales with the operations, the fixed time with the parameters, which the optimizer
    visits once per step. Several neighbours are averaged with weights 1 / (distance² + 0.01). A knee is not
    transferred: another model leaves the cache at another size. Neighbours beyond MAX_DISTANCE, or without
    known operations, are not used.
    """
    near = [
        (1 / (distance**2 + _SOFTENING), features, step_time)
        for features, step_time in known
        if target.num_operations
        and features.num_operations
        and (distance := feature_distance(target, features)) <= MAX_DISTANCE
    ]
    total = sum(weight for weight, _, _ in near)
    if not near:
        return None
    return StepTime(
        fixed_s=sum(
            weight * step_time.fixed_s * _ratio(target.num_parameters, features.num_parameters)
            for weight, features, step_time in near
        )
        / total,
        per_sample_s=sum(
            weight * step_time.per_sample_s * target.num_operations / features.num_operations
            for weight, features, step_time in near
        )
        / total,
    )


def _ratio(first: int, second: int) -> float:
    """Return first / second; 1 when either is unknown."""
    return first / second if first and second else 1.0


def _log_ratio(first: int, second: int) -> float:
    if first and second:
        return math.log(first / second)
    return math.log(UNKNOWN_RATIO) if first or second else 0.0
