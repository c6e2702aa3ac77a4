"""Models that were measured before as a start for one that was not; pure.

After "A History-Based Auto-Tuning Framework for Fast and High Performance DNN Design on GPU" (2020): records
of unlike models mislead more than none at all, so that neighbours are ordered by a distance over their
features, and far ones are left out. The paper learns how much each feature counts; with a handful of
records the weights are fixed here.

    distance² = Σ_f weight_f · ln(a_f / b_f)²

so that twice the operations are as far as half of them, and units do not matter.
"""

import math
from collections.abc import Sequence

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.measurements import ModelFeatures

WEIGHTS = {"num_operations": 1.0, "num_parameters": 0.5, "num_trainable": 0.5, "input_elements": 0.25}
"""Operations make most of a step; parameters the optimizer's part of it, the input what is read and moved."""

UNKNOWN_RATIO = 4.0
"""A feature that is known of one model alone counts as this many times different."""

MAX_DISTANCE = math.log(16)
"""Such as 16 times the operations, all else equal: a neighbour beyond it says nothing."""

_SOFTENING = 0.01
"""Of a squared distance: the nearest of several leads, but does not silence the next."""


def feature_distance(one: ModelFeatures, other: ModelFeatures) -> float:
    """How unlike two models are: at least 0, the same both ways, 0 for equal features.

    A feature that is known of neither (0) is left out.
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
    """The step of `target` on a machine, from those of other models on that machine; None when none can tell.

    The time of a sample grows with the operations, the fixed time with the parameters, which the optimizer
    goes over once a step; several neighbours are averaged with weights 1 / (distance² + 0.01). A knee is not
    carried over: where another model leaves the cache says little. Neighbours beyond MAX_DISTANCE, or whose
    operations are not known, have no part in it.
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
    """1 when one is not known."""
    return one / other if one and other else 1.0


def _log_ratio(one: int, other: int) -> float:
    if one and other:
        return math.log(one / other)
    return math.log(UNKNOWN_RATIO) if one or other else 0.0
