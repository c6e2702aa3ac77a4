"""What a picture's first bytes say of it: kind and size, before anything is decoded."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from csdctl.worker.ingest.sources.gif import frame_size

_BMP_PLAIN, _BMP_MASKS = 0, 3

_JPEG_SIZES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers that begin a frame, and so have its size."""

_JPEG_ALONE = {0x01, *range(0xD0, 0xD8)}
"""Markers without a length behind them."""


@dataclass(frozen=True)
class Header:
    """A picture's kind ('png', 'jpeg', 'bmp', 'gif') and its size in pixels."""

    kind: str
    width: int
    height: int


def read_header(content: bytes) -> Header | None:
    """The header of an encoded picture, None for another kind of file; raises ValueError when damaged."""
    for kind, magic, read_size in _KINDS:
        if content.startswith(magic):
            try:
                width, height = read_size(content)
            except (struct.error, IndexError):
                raise ValueError(f"{kind} is cut short") from None
            if width < 1 or height < 1:
                raise ValueError(f"{kind} without pixels")
            return Header(kind, width, height)
    return None


def _png_size(content: bytes) -> tuple[int, int]:
    if content[12:16] != b"IHDR":
        raise ValueError("png without a header")
    width, height = struct.unpack_from(">II", content, 16)
    return width, height


def _bmp_size(content: bytes) -> tuple[int, int]:
    """Raises ValueError for what TensorFlow misreads: packed rows, other orders of colours."""
    header_bytes, width, height, _, _, packing = struct.unpack_from("<IiiHHI", content, 14)
    if header_bytes < 40 or packing not in (_BMP_PLAIN, _BMP_MASKS):
        raise ValueError("bmp of a rare kind")
    if packing == _BMP_MASKS and struct.unpack_from("<III", content, 54) != (0xFF0000, 0xFF00, 0xFF):
        raise ValueError("bmp with a rare order of colours")
    return width, abs(height)  # negative: rows from top to bottom


def _jpeg_size(content: bytes) -> tuple[int, int]:
    position = 2
    while True:
        if content[position] != 0xFF:
            raise ValueError("jpeg without a size")
        marker = content[position + 1]
        if marker == 0xFF:  # a byte that fills
            position += 1
        elif marker in _JPEG_ALONE:
            position += 2
        elif marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", content, position + 5)
            return width, height
        else:
            (length,) = struct.unpack_from(">H", content, position + 2)
            position += 2 + length


_KINDS: tuple[tuple[str, bytes, Callable[[bytes], tuple[int, int]]], ...] = (
    ("png", b"\x89PNG\r\n\x1a\n", _png_size),
    ("jpeg", b"\xff\xd8\xff", _jpeg_size),
    ("gif", b"GIF87a", frame_size),
    ("gif", b"GIF89a", frame_size),
    ("bmp", b"BM", _bmp_size),
)
