"""The verdict of a verification, from the numbers that rank 0 measured."""

import dataclasses
import math

import pytest

from csdctl.worker.protocol.events import RankVerified, Verified
from csdctl.workflows.train.verdict import TOLERATED_SPREADS, judge

NODES = ["host", "csd0", "csd1"]
SAME = RankVerified(0.0, 1e-6, 0.1)
RIGHT = Verified(
    *(0, "host", 33, (16, 12, 5), "float32"),
    (SAME, RankVerified(TOLERATED_SPREADS * 1e-6, 1e-6, 0.1), SAME),
    sum_difference=1.7e-7,
    sum_rounding=1.8e-7,
    by_parts=1e-6,
    as_one_batch=1e-6,
    as_one_batch_spread=1e-6,
    not_as_one_batch=(),
    weights_hash="hash",
    collective="star",
)


def changed(**fields: object) -> Verified:
    return dataclasses.replace(RIGHT, **fields)  # type: ignore[arg-type]


def with_rank(rank: RankVerified) -> Verified:
    return changed(of_ranks=(SAME, rank, SAME))


def test_differences_within_the_spreads_are_equal() -> None:
    verdict = judge(RIGHT, NODES)
    assert verdict.is_equal
    assert verdict.text == "equal: as near as one process is to itself in float32"


@pytest.mark.parametrize(
    ("verified", "told"),
    [
        (with_rank(RankVerified(9e-6, 1e-6, 0.1)), "csd0: the gradient differs by 9.0e-06"),
        (with_rank(RankVerified(0.0, 0.01, 0.07)), "rounding to float32 moves the gradient by 1.0e-02"),
        (with_rank(RankVerified(0.0, 1e-7, 0.0)), "another sample does not change the gradient"),
        (with_rank(RankVerified(math.nan, 1e-6, 0.1)), "on csd0 is not finite in float32"),
        (with_rank(RankVerified(0.0, math.nan, math.inf)), "is not finite in float32"),
        (changed(sum_difference=1.9e-7), "the sum that all ranks got is not the sum of what they computed"),
        (changed(sum_difference=math.nan), "is not finite"),
        (changed(as_one_batch=0.01), "one batch of all samples has another gradient"),
        (changed(as_one_batch=math.nan), "one batch of all samples has another gradient"),
    ],
)
def test_everything_else_is_told(verified: Verified, told: str) -> None:
    verdict = judge(verified, NODES)
    assert not verdict.is_equal
    assert told in verdict.text
    assert verdict.remedy


def test_what_was_not_compared_with_one_batch_is_equal_all_the_same() -> None:
    reasons = ("random numbers in dropout",)
    assert judge(changed(as_one_batch=None, not_as_one_batch=reasons), NODES).is_equal
