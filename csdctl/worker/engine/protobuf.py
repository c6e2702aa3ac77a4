"""Protocol buffers in their wire format, without the package protobuf."""

from collections.abc import Iterator
from typing import Any

import numpy as np

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Types of a field in the wire format."""
_MAX_VARINT = 10


def encode_varint(value: int) -> bytes:
    """Return an integer as a varint, a negative one as its 64 bits."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def encode_field(number: int, value: int | bytes) -> bytes:
    """Return a field: an integer, or bytes, which may be an encoded message."""
    if isinstance(value, int):
        return encode_varint(number << 3 | VARINT) + encode_varint(value)
    return encode_varint(number << 3 | BYTES) + encode_varint(len(value)) + value


def parse_fields(content: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield number, type and value of each field: an int for VARINT, else bytes. Raises ValueError."""
    place = 0
    while place < len(content):
        tag, place = _read_varint(content, place)
        number, kind = tag >> 3, tag & 7
        if not number or kind not in (VARINT, FIXED64, BYTES, FIXED32):
            raise ValueError(f"field {number} has the type {kind}")
        size = {FIXED64: 8, FIXED32: 4}.get(kind)
        if size is None:
            size, place = _read_varint(content, place)
        if kind == VARINT:
            yield number, kind, size
            continue
        if size > len(content) - place:
            raise ValueError(f"field {number} is truncated")
        yield number, kind, content[place : place + size]
        place += size


def _read_varint(content: memoryview, start: int) -> tuple[int, int]:
    """Return a varint, unsigned, and the place after it."""
    value = 0
    for place in range(start, min(len(content), start + _MAX_VARINT)):
        value |= (content[place] & 0x7F) << 7 * (place - start)
        if content[place] < 0x80:
            return value & (1 << 64) - 1, place + 1
    raise ValueError("a varint is truncated")


def parse_int64s(content: memoryview) -> list[int]:
    """Return the values of a packed field of type int64. Raises ValueError."""
    if not content:
        return []
    read = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(read < 0x80) + 1
    if not len(ends) or ends[-1] != len(read):
        raise ValueError("a varint is truncated")
    starts = np.concatenate([[0], ends[:-1]])
    places = np.arange(len(read)) - np.repeat(starts, ends - starts)
    if places.max() >= _MAX_VARINT:
        raise ValueError("a varint is too long")
    parts = (read & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    values: list[int] = np.bitwise_or.reduceat(parts, starts).view(np.int64).tolist()
    return values
