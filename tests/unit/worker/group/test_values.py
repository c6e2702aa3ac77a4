"""Values of other ranks: read as their annotation says, and otherwise their rank's fault."""

import contextlib
import json
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.worker.group.messages import join_parts, split_parts
from csdctl.worker.group.values import PeerFaultError, decode_value, decode_values, encode_value, is_minority
from csdctl.worker.protocol.json_codec import Between

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


def test_minority_is_some_and_fewer_than_half() -> None:
    assert [is_minority([1] * count, 5) for count in range(5)] == [False, True, True, False, False]
    assert not is_minority([1], 2)


@given(st.lists(st.binary()), st.binary(), st.integers(0, 5))
def test_parts_are_split_as_they_were_joined_and_other_bytes_refused(
    parts: list[bytes], other: bytes, count: int
) -> None:
    assert split_parts(join_parts(parts), len(parts)) == parts
    with contextlib.suppress(ValueError):
        assert len(split_parts(other, count)) == count
