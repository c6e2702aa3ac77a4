"""Values of other ranks, ends of their vectors, counts of bytes: as expected, or their rank's fault."""

import contextlib
import json
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.worker.group.messages import Counters, gather_traffic, join_parts, split_parts
from csdctl.worker.group.values import (
    ExpectedTails,
    PeerFaultError,
    decode_value,
    decode_values,
    encode_value,
)
from csdctl.worker.protocol.json_codec import Between, ProtocolError, read_as

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


def test_first_rank_at_fault_is_named_and_what_it_sent_is_shown_escaped_and_short() -> None:
    with pytest.raises(PeerFaultError) as caught:
        decode_values(Annotated[int, Between(0, 5)], [b"1", b'"\x1b]52;' + b"x" * 500 + b'"', b"x"])
    assert caught.value.rank == 1
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 200


@given(st.lists(st.binary()), st.binary(), st.integers(0, 5))
def test_parts_are_split_as_they_were_joined_and_other_bytes_refused(
    parts: list[bytes], other: bytes, count: int
) -> None:
    assert split_parts(join_parts(parts), len(parts)) == parts
    with contextlib.suppress(ValueError):
        assert len(split_parts(other, count)) == count


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


HOST, NODE, OTHER = "10.0.0.1 1", "10.0.0.2 2", "10.0.0.3 3"


def traffic(*ranks: Any) -> dict[tuple[str, int, int], int]:
    """What `gather_traffic` makes of what the ranks say: [messages, connections] each."""

    def gather(_: Any, hint: Any) -> Sequence[Counters]:
        return [read_as(hint, rank) for rank in ranks]

    return {(row.what, row.sender, row.receiver): row.num_bytes for row in gather_traffic(gather, [], ())}


def test_bytes_of_messages_are_told_apart_from_those_of_sums() -> None:
    host = [[["state", 0, 1, 300]], [[HOST, NODE, 1000, 500]]]
    node = [[], [[NODE, HOST, 500, 1000]]]
    assert traffic(host, node) == {("state", 0, 1): 300, ("sums", 0, 1): 700, ("sums", 1, 0): 500}


def test_node_cannot_claim_bytes_that_the_other_end_has_not_seen() -> None:
    host = [[], [[HOST, NODE, 1000, 500]]]
    assert traffic(host, [[], [[NODE, HOST, 1 << 49, 0]]]) == {("sums", 1, 0): 500}
    assert traffic(host, [[], [[NODE, HOST, 500, 1 << 49]]]) == {("sums", 0, 1): 1000, ("sums", 1, 0): 500}
    assert traffic(host, [[], [[NODE, OTHER, 1 << 49, 1 << 49]]]) == {}


def test_node_can_take_neither_another_ones_connections_nor_messages() -> None:
    host = [[], [[HOST, NODE, 1000, 500]]]
    node = [[["state", 1, 0, 1 << 49]], [[NODE, HOST, 500, 1000]]]
    thief = [[], [[HOST, NODE, 7, 7], [NODE, HOST, 7, 7]]]
    assert traffic(host, node) == {("sums", 0, 1): 1000, ("sums", 1, 0): 500}
    assert traffic(host, node, thief)["sums", 0, 1] == 1000


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[]],
        [[["sums", 0, 1, 5]], []],
        [[["state", 0, -1, 5]], []],
        [[], [[HOST, NODE, 1]]],
        [[], [[HOST, NODE, 1, 1 << 60]]],
        [[], [["x" * 81, NODE, 1, 1]]],
    ],
)
def test_counters_of_another_form_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        read_as(Counters, value)
