"""The verdict of a verification, from the numbers that rank 0 measured."""

import dataclasses
import math

import pytest

from csdctl.errors import RunError
from csdctl.worker.protocol.events import Compared, Verified
from csdctl.worker.protocol.features import Recomputed
from csdctl.workflows.train.verify import FEATURE_TOLERANCE, NEAR, Verification, judge

NODES = ["host", "csd0", "csd1"]
SAME, APART = Compared(0.0, 1e-6, 0.1), Compared(NEAR * 1e-6, 1e-6, 0.1)
RIGHT = Verified(
    *(0, "host", 33, (16, 12, 5), "float32"),
    sum_difference=1.7e-7,
    sum_rounding=1.8e-7,
    compared_in="float32",
    of_ranks=(SAME, APART, SAME),
    one_batch=SAME,
    not_one_batch=(),
    weights_hash="hash",
)


def changed(**fields: object) -> Verified:
    return dataclasses.replace(RIGHT, **fields)  # type: ignore[arg-type]


def with_rank(rank: Compared) -> Verified:
    return changed(of_ranks=(SAME, rank, SAME))


def test_differences_of_a_few_spreads_are_as_near_as_one_process() -> None:
    verdict = judge(RIGHT, NODES)
    assert verdict.is_equal
    assert verdict.text == "equal: within the rounding of float32"
    assert judge(with_rank(Compared(9e-5, 0.01, 0.9)), NODES).is_equal, "far below the effect of one sample"
    reasons = ("random numbers in dropout",)
    assert judge(changed(one_batch=None, not_one_batch=reasons), NODES).is_equal


def test_differences_of_more_spreads_are_named_and_compared_with_one_sample() -> None:
    verdict = judge(with_rank(Compared(2e-4, 1e-6, 0.1)), NODES)
    assert verdict.is_equal
    assert "200 times the rounding of float32" in verdict.text
    assert "one sample makes 500 times as much" in verdict.text


@pytest.mark.parametrize(
    ("verified", "text"),
    [
        (with_rank(Compared(4e-4, 1e-6, 0.1)), "csd0: the gradient differs by 4.0e-04"),
        (with_rank(Compared(1e-4, 0.01, 0.9)), "rounding in float32 moves the gradient by 1.0e-02"),
        (with_rank(Compared(0.0, 1e-7, 0.0)), "another sample has the same gradient"),
        (with_rank(Compared(math.nan, 1e-6, 0.1)), "on csd0 is 0 or not finite in float32"),
        (with_rank(Compared(0.0, math.nan, math.inf)), "is 0 or not finite in float32"),
        (changed(sum_difference=1.9e-7), "the ranks did not get the sum of their vectors"),
        (changed(sum_difference=math.nan), "not finite"),
        (changed(one_batch=Compared(0.01, 1e-6, 0.1)), "the gradient of one batch of all samples differs"),
        (changed(one_batch=Compared(math.nan, 1e-6, 0.1)), "gradient of one batch of all samples differs"),
    ],
)
def test_every_other_result_is_a_failure_with_its_cause(verified: Verified, text: str) -> None:
    verdict = judge(verified, NODES)
    assert not verdict.is_equal
    assert text in verdict.text
    assert verdict.remedy


@pytest.mark.parametrize("difference", [2 * FEATURE_TOLERANCE, math.nan])
def test_machine_that_stored_other_features_than_it_computes_now_is_named(difference: float) -> None:
    stored = {"host": Recomputed(100, FEATURE_TOLERANCE), "csd0": Recomputed(0, 0.0)}
    Verification(tuple(NODES), RIGHT, stored).check()
    with pytest.raises(RunError, match="its stored features differ") as raised:
        Verification(tuple(NODES), RIGHT, stored | {"csd0": Recomputed(100, difference)}).check()
    assert raised.value.node == "csd0"
