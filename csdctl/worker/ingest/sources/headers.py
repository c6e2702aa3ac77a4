"""Format and size of an encoded image, from its first bytes, before anything is decoded."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from csdctl.worker.ingest.sources.gif import frame_size

_BMP_PLAIN, _BMP_MASKS = 0, 3

_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers that start a frame header, which has the size."""

_JPEG_STANDALONE = {0x01, *range(0xD0, 0xD8)}
"""Markers that are not followed by a length."""


@dataclass(frozen=True)
class Header:
    """Format of an image ('png', 'jpeg', 'bmp', 'gif') and its size in pixels."""

    format: str
    width: int
    height: int


def read_header(content: bytes) -> Header | None:
    """Return the header of an encoded image, None for other formats; raises ValueError if it is damaged."""
    for name, magic, read_size in _FORMATS:
        if content.startswith(magic):
            try:
                width, height = read_size(content)
            except (struct.error, IndexError):
                raise ValueError(f"{name} is truncated") from None
            if width < 1 or height < 1:
                raise ValueError(f"{name} without pixels")
            return Header(name, width, height)
    return None


def _png_size(content: bytes) -> tuple[int, int]:
    if content[12:16] != b"IHDR":
        raise ValueError("PNG without a header")
    width, height = struct.unpack_from(">II", content, 16)
    return width, height


def _bmp_size(content: bytes) -> tuple[int, int]:
    """Raise ValueError for variants that TensorFlow misreads: compressed rows, other channel orders."""
    header_bytes, width, height, _, _, compression = struct.unpack_from("<IiiHHI", content, 14)
    if header_bytes < 40 or compression not in (_BMP_PLAIN, _BMP_MASKS):
        raise ValueError("unsupported BMP variant")
    if compression == _BMP_MASKS and struct.unpack_from("<III", content, 54) != (0xFF0000, 0xFF00, 0xFF):
        raise ValueError("unsupported BMP channel order")
    return width, abs(height)  # negative if rows are stored from top to bottom


def _jpeg_size(content: bytes) -> tuple[int, int]:
    position = 2
    while True:
        if content[position] != 0xFF:
            raise ValueError("JPEG without a size")
        marker = content[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in _JPEG_STANDALONE:
            position += 2
        elif marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", content, position + 5)
            return width, height
        else:
            (length,) = struct.unpack_from(">H", content, position + 2)
            position += 2 + length


_FORMATS: tuple[tuple[str, bytes, Callable[[bytes], tuple[int, int]]], ...] = (
    ("png", b"\x89PNG\r\n\x1a\n", _png_size),
    ("jpeg", b"\xff\xd8\xff", _jpeg_size),
    ("gif", b"GIF87a", frame_size),
    ("gif", b"GIF89a", frame_size),
    ("bmp", b"BM", _bmp_size),
)
