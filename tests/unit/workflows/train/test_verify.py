"""The verdict of a verification, from the numbers that rank 0 measured."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from csdctl.errors import InputError, RunError
from csdctl.worker.protocol.events import Verified
from csdctl.workflows.train.verify import NEAR, Verification, find_ranges, judge

NODES = ("host", "csd0", "csd1")
RIGHT = Verified(
    *(0, "host", (16, 12, 5), "float32"),
    sum_difference=1.7e-7,
    sum_rounding=1.8e-7,
    compared_in="float32",
    differences=(0.0, NEAR * 1e-6, 0.0),
    spread=1e-6,
    one_sample=0.1,
    weights_hash="hash",
)


def changed(difference: float = 0.0, **fields: object) -> Verified:
    return dataclasses.replace(RIGHT, **{"differences": (0.0, difference, 0.0), **fields})  # type: ignore[arg-type]


def test_ranges_are_of_each_column_of_a_table_and_of_all_pixels(tmp_path: Path) -> None:
    samples = np.zeros(3, [("table", np.float32, (2,)), ("image", np.uint8, (2, 2))])
    samples["table"] = [[1990, 0.5], [2020, -1], [np.nan, 9]]
    samples["image"][1, 0, 1] = 255
    np.save(tmp_path / "images.npy", samples)
    assert find_ranges(tmp_path) == {"table": [[1990, 2020], [-1, 0.5]], "image": [[0, 255]]}
    np.save(tmp_path / "images.npy", samples["table"][:2])
    assert find_ranges(tmp_path) == {"": [[1990, 2020], [-1, 0.5]]}
    with pytest.raises(InputError, match="the public data cannot be read"):
        find_ranges(tmp_path / "none")


@pytest.mark.parametrize(
    ("verified", "texts"),
    [
        (RIGHT, ["equal: within the rounding of float32"]),
        (changed(9e-5, spread=0.01, one_sample=0.91), ["equal: within the rounding"]),
        (changed(2e-4), ["200 times the rounding of float32", "one sample makes 500 times as much"]),
    ],
)
def test_differences_far_below_the_effect_of_one_sample_are_equal(
    verified: Verified, texts: list[str]
) -> None:
    verdict = judge(verified, NODES)
    assert verdict.is_equal
    assert all(text in verdict.text for text in texts)
    Verification(NODES, verified).check()


@pytest.mark.parametrize(
    ("verified", "text"),
    [
        (changed(4e-4), "csd0: the gradient differs by 4.0e-04"),
        (changed(1e-4, spread=0.01, one_sample=0.9), "rounding in float32 moves the gradient by 1.0e-02"),
        (changed(spread=1e-7, one_sample=0.0), "another sample has the same gradient"),
        (changed(math.nan), "on csd0 is 0 or not finite in float32"),
        (changed(spread=math.nan, one_sample=math.inf), "is 0 or not finite in float32"),
        (changed(sum_difference=1.9e-7), "the ranks did not get the sum of their vectors"),
        (changed(sum_difference=math.nan), "not finite"),
    ],
)
def test_every_other_result_is_a_failure_with_its_cause(verified: Verified, text: str) -> None:
    verdict = judge(verified, NODES)
    assert not verdict.is_equal
    assert text in verdict.text
    assert verdict.remedy
    with pytest.raises(RunError):
        Verification(NODES, verified).check()
