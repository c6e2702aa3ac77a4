"""Encoded images for tests: by TensorFlow, and byte by byte what it cannot encode."""

import base64
import struct
import zlib
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_tensorflow

CMYK_RED_JPEG = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgIDAgIDAwMDBAMDBAUIBQUEBAUKBwcGCAwKDAwLCgsLDQ4SEA0OEQ4LCxAWEBETFBUVFQwP"
    "FxgWFBgSFBUU/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EABQAAQAAAAAAAAAAAAAAAAAAAAn/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/9oA"
    "DgRDAE0AWQBLAAA/AFTFUKoqb//Z"
)
"""8×8, Adobe CMYK with cyan 0, magenta 255, yellow 255, black 0."""

PALETTE = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9)]


def tensorflow() -> Any:
    return load_tensorflow()


def colours(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def flat(height: int, width: int, *colour: int) -> np.ndarray:
    return np.tile(np.array(colour, np.uint8), (height, width, 1))


def png(image: np.ndarray) -> bytes:
    return bytes(tensorflow().io.encode_png(image).numpy())


def jpeg(image: np.ndarray) -> bytes:
    return bytes(tensorflow().io.encode_jpeg(image, quality=100).numpy())


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def raw_png(
    width: int, height: int, rows: bytes, *, depth: int = 8, colour_type: int = 3, extra: bytes = b""
) -> bytes:
    """Return a PNG of `rows`, given without the filter byte that starts each row."""
    size = len(rows) // height
    filtered = b"".join(b"\0" + rows[start : start + size] for start in range(0, len(rows), size))
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    parts = _chunk(b"IHDR", header) + extra + _chunk(b"IDAT", zlib.compress(filtered)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def palette_png(indices: np.ndarray, *, transparent: int | None = None) -> bytes:
    extra = _chunk(b"PLTE", bytes(value for colour in PALETTE for value in colour))
    if transparent is not None:
        extra += _chunk(b"tRNS", bytes(0 if n == transparent else 255 for n in range(len(PALETTE))))
    height, width = indices.shape
    return raw_png(width, height, indices.astype(np.uint8).tobytes(), extra=extra)


def huge_png(width: int, height: int) -> bytes:
    """Return a small file with a header that claims a large size."""
    return raw_png(1, 1, b"\0\0\0", colour_type=2).replace(
        struct.pack(">II", 1, 1), struct.pack(">II", width, height), 1
    )


def bmp(image: np.ndarray, *, palette: list[tuple[int, int, int]] | None = None, packing: int = 0) -> bytes:
    """`image` is (h, w, 3), (h, w, 4) or, with a palette, (h, w) indices."""
    height, width = image.shape[:2]
    depth = 8 if palette else 8 * image.shape[2]
    table = b"".join(bytes((blue, green, red, 0)) for red, green, blue in palette or ())
    flipped = image[::-1] if palette else image[::-1, :, [2, 1, 0, 3][: image.shape[2]]]
    num_colours = len(table) // 4
    rows = b"".join(row.tobytes() + bytes(-len(row.tobytes()) % 4) for row in flipped)
    begin = 54 + len(table)
    return (
        b"BM"
        + struct.pack("<IHHI", begin + len(rows), 0, 0, begin)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, depth, packing, len(rows), 0, 0, num_colours, 0)
        + table
        + rows
    )


def gif(*frames: np.ndarray, transparent: int | None = None, screen: tuple[int, int] | None = None) -> bytes:
    """Return a GIF of frames, indices into PALETTE, of at most 100 pixels; `screen` is (width, height)."""
    height, width = frames[0].shape
    begin = b"GIF89a" + struct.pack("<HH", *(screen or (width, height))) + b"\x81\0\0"
    begin += bytes(value for colour in PALETTE for value in colour)
    return begin + b"".join(_gif_frame(frame, transparent) for frame in frames) + b";"


def _gif_frame(indices: np.ndarray, transparent: int | None) -> bytes:
    """Use 8-bit codes only: within 100 pixels the code table does not outgrow them."""
    height, width = indices.shape
    codes = bytes([0x80, *indices.astype(np.uint8).reshape(-1).tolist(), 0x81])
    blocks = b"".join(
        bytes([len(codes[at : at + 255])]) + codes[at : at + 255] for at in range(0, len(codes), 255)
    )
    control = b""
    if transparent is not None:
        control = b"\x21\xf9\x04\x01\0\0" + bytes([transparent]) + b"\0"
    return control + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x07" + blocks + b"\0"
