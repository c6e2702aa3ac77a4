"""Guess the step time of a model that was never measured from similar ones; pure.

After "A History-Based Auto-Tuning Framework for Fast and High Performance DNN Design on GPU" (2020): records
of dissimilar models are worse than none, so neighbours are ordered by a distance over their features, and
distant ones are left out. The paper learns the weights of the features; with a handful of records they are
fixed here.

    distance² = Σ_f weight_f · ln(a_f / b_f)²

Twice the operations are as far as half of them, and units do not matter.
"""

import math
from collections.abc import Sequence

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.measurements import ModelFeatures

WEIGHTS = {"num_operations": 1.0, "num_parameters": 0.5, "num_trainable": 0.5, "input_elements": 0.25}
"""Operations take most of a step; parameters stand for the optimizer, the input for what is moved."""

UNKNOWN_RATIO = 4.0
"""The assumed ratio of a feature that is known for one model only."""

MAX_DISTANCE = math.log(16)
"""For example 16 times the operations, all else equal: a neighbour beyond it is not used."""

_SOFTENING = 0.01
"""Added to squared distances: the nearest neighbour dominates, but not alone."""


def feature_distance(one: ModelFeatures, other: ModelFeatures) -> float:
    """Return the distance of two models: at least 0, symmetric, 0 for equal features.

    A feature that is known for neither (0) is left out.
    """
    return math.sqrt(
        sum(
            weight * _log_ratio(getattr(one, name), getattr(other, name)) ** 2
            for name, weight in WEIGHTS.items()
        )
    )


def transfer_step_time(
    target: ModelFeatures, known: Sequence[tuple[ModelFeatures, StepTime]]
) -> StepTime | None:
    """Guess the step time of `target` from other models on the same machine; None when none is near.

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


def _ratio(one: int, other: int) -> float:
    """Return one / other; 1 when either is not known."""
    return one / other if one and other else 1.0


def _log_ratio(one: int, other: int) -> float:
    if one and other:
        return math.log(one / other)
    return math.log(UNKNOWN_RATIO) if one or other else 0.0
