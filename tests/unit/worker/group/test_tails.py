"""The ends of the ranks' vectors, as rank 0 expects them."""

import math

import numpy as np
import pytest

from csdctl.worker.group.values import ExpectedTails, PeerFaultError

EXPECTED = ExpectedTails(3, (0, 2, 5), (8.0, 6.0, 0.0))
"""A run of six ranks, three of which are in the group; vectors have three elements before n."""


def vector(count: float, rank: int, seconds: float = 0.5, stop: float = 0.0) -> np.ndarray:
    found = np.zeros(3 + 2 + 6 + 1, np.float32)
    found[:3], found[-1] = 7.0, 9.0
    found[3:5] = count, stop
    found[5 + rank] = seconds
    return found


def test_vectors_as_expected_pass() -> None:
    EXPECTED.check([vector(6, 2), vector(0, 5)])
    EXPECTED.check([vector(6.001, 2, 0.0), vector(0, 5, 3600.0)])
    ExpectedTails(3, (0,), (8.0,)).check([])


def test_seconds_in_the_place_of_another_rank_are_refused() -> None:
    for own_s in (0.5, 0.0):
        found = vector(6, 2, own_s)
        found[5 + 5] = 30.0
        with pytest.raises(PeerFaultError, match="the time of another rank") as caught:
            EXPECTED.check([found, vector(0, 5)])
        assert caught.value.rank == 1


def test_expectation_is_sent_to_the_link_unchanged() -> None:
    assert ExpectedTails.unpack(EXPECTED.pack()) == EXPECTED


def test_sum_is_that_of_all_samples() -> None:
    total = vector(8, 0) + vector(6, 2) + vector(0, 5)
    assert EXPECTED.is_count_of(total)
    assert not EXPECTED.is_count_of(total * 1.01)
    assert not EXPECTED.is_count_of(total * np.float32(math.nan))
