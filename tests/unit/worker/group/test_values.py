"""Values of other ranks, and ends of their vectors: as expected, or their rank's fault."""

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.worker.group.channel import join_parts, split_parts
from csdctl.worker.group.values import decode_value, encode_value, find_fault

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_value_survives_unless_it_has_a_number_that_json_lacks(value: Any) -> None:
    try:
        encoded = encode_value(value)
    except ValueError:
        assert "NaN" in json.dumps(value) or "Infinity" in json.dumps(value)
    else:
        assert decode_value(Any, encoded) == value


@given(st.lists(st.binary()), st.binary())
def test_parts_are_split_as_they_were_joined_and_other_bytes_refused(
    parts: list[bytes], content: bytes
) -> None:
    assert split_parts(join_parts(parts)) == parts
    with contextlib.suppress(ValueError):
        assert join_parts(split_parts(content)) == content


COUNTS = {0: 8.0, 2: 6.0, 5: 0.0}
"""A run of six ranks, three of which take part."""


def tail(
    count: float, rank: int, seconds: float = 0.5, stop: float = 0.0, duration: float = 0.0
) -> np.ndarray:
    made = np.zeros(3 + 6 + 1, np.float32)
    made[:3], made[-1] = (count, stop, duration), 9.0
    made[3 + rank] = seconds
    return made


def test_vectors_and_their_sums_as_expected_pass() -> None:
    for count, rank, seconds in ((6, 2, 0.5), (0, 5, 0.5), (6.001, 2, 0.0), (0, 5, 3600.0)):
        assert find_fault(tail(count, rank, seconds), COUNTS, (rank,)) == ""
    assert find_fault(tail(6, 2) + tail(0, 5), COUNTS, (2, 5)) == ""


@pytest.mark.parametrize(
    ("count", "seconds", "stop", "words"),
    [
        (7, 0.5, 0, "sent the gradient of 7 samples, expected 6"),
        (np.nan, 0.5, 0, "sent the gradient of nan samples, expected 6"),
        (6, 0.5, 1, "asked all ranks to stop"),
        (6, 3601, 0, "sent 3601 s as the time of its step"),
        (6, -1, 0, "sent -1 s as the time of its step"),
        (6, np.nan, 0, "sent nan s as the time of its step"),
    ],
)
def test_other_ends_are_refused(count: float, seconds: float, stop: float, words: str) -> None:
    assert words in find_fault(tail(count, 2, seconds, stop), COUNTS, (2,))


def test_duration_from_another_rank_than_0_is_refused() -> None:
    assert "which only rank 0 knows" in find_fault(tail(6, 2, duration=0.2), COUNTS, (2,))


def test_seconds_in_the_place_of_another_rank_are_refused() -> None:
    for own_s in (0.5, 0.0):
        sent = tail(6, 2, own_s)
        sent[3 + 5] = 30.0
        assert "the time of another rank" in find_fault(sent, COUNTS, (2,))
