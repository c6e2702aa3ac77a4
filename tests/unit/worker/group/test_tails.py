"""The ends of the ranks' vectors, as rank 0 expects them."""

import math

import numpy as np
import pytest

from csdctl.worker.group.values import ExpectedTails, PeerFaultError
from csdctl.worker.protocol.json_codec import from_json, to_json

EXPECTED = ExpectedTails(3, (0, 2, 5), (8.0, 6.0, 0.0))
"""A run of six ranks, three of which are in the group; vectors have three elements before n."""


def vector(count: float, rank: int, seconds: float = 0.5, stop: float = 0.0) -> np.ndarray:
    found = np.zeros(3 + 2 + 6, np.float32)
    found[:3] = 7.0
    found[3:5] = count, stop
    found[5 + rank] = seconds
    return found


def test_vectors_as_expected_pass() -> None:
    EXPECTED.check([vector(6, 2), vector(0, 5)])
    EXPECTED.check([vector(6.001, 2, 0.0), vector(0, 5, 3600.0)])
    ExpectedTails(3, (0,), (8.0,)).check([])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (vector(0.5, 5), "the gradient of 0.5 samples, expected 0"),
        (vector(0, 5, stop=1), "asked all ranks to stop"),
        (vector(0, 5, math.inf), "inf s as the time"),
        (vector(0, 5) + vector(0, 4) - 0.0, "the time of another rank"),
    ],
)
def test_vector_with_another_end_is_its_ranks_fault(changed: np.ndarray, words: str) -> None:
    with pytest.raises(PeerFaultError) as caught:
        EXPECTED.check([vector(6, 2), changed])
    assert caught.value.rank == 2
    assert words in caught.value.message


def test_expectation_is_sent_to_the_link_unchanged() -> None:
    assert from_json(ExpectedTails, to_json(EXPECTED)) == EXPECTED


def test_sum_is_that_of_all_samples() -> None:
    total = vector(8, 0) + vector(6, 2) + vector(0, 5)
    assert EXPECTED.is_count_of(total)
    assert not EXPECTED.is_count_of(total * 1.01)
    assert not EXPECTED.is_count_of(total * np.float32(math.nan))
