"""The wire format, compared with the package protobuf."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.train import Int64List

from csdctl.worker.engine.protobuf import BYTES, FIXED32, VARINT, encode_field, parse_fields, parse_int64s

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(INT64))
def test_integers_are_those_of_protobuf(values: list[int]) -> None:
    ((number, kind, packed),) = parse_fields(
        memoryview(Int64List(value=values).SerializeToString() or b"\n\0")
    )
    assert (number, kind) == (1, BYTES)
    assert parse_int64s(packed) == values
    unpacked = b"".join(encode_field(1, value) for value in values)
    assert list(Int64List.FromString(unpacked).value) == values
    assert [value for _, _, value in parse_fields(memoryview(unpacked))] == [
        one % (1 << 64) for one in values
    ]


def test_fields_of_all_types_are_parsed() -> None:
    content = encode_field(1, 300) + encode_field(2000, b"text") + b"\x1d" + np.float32(2).tobytes()
    found = [(number, kind, value) for number, kind, value in parse_fields(memoryview(content))]
    assert found == [(1, VARINT, 300), (2000, BYTES, b"text"), (3, FIXED32, np.float32(2).tobytes())]


@pytest.mark.parametrize(
    "content", [b"\x00\x00", b"\x0b", b"\x0e", b"\x0a\x02a", b"\x0d\0\0\0", b"\x80" * 11]
)
def test_anything_else_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="field|varint"):
        list(parse_fields(memoryview(content)))


@pytest.mark.parametrize("content", [b"\x80", b"\x01\x80", b"\x80" * 10 + b"\x01"])
def test_damaged_integers_are_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="varint"):
        parse_int64s(memoryview(content))
