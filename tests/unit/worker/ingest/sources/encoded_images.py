"""Encoded images for tests."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from csdctl.worker.compute.backend import load_backend

CMYK_RED_JPEG = base64.b64decode(
    "/9j/7gAOQWRvYmUAZAAAAAAA/9sAQwADAgIDAgIDAwMDBAMDBAUIBQUEBAUKBwcGCAwKDAwLCgsLDQ4SEA0OEQ4LCxAWEBETFBUVFQwP"
    "FxgWFBgSFBUU/8AAFAgACAAIBEMRAE0RAFkRAEsRAP/EABQAAQAAAAAAAAAAAAAAAAAAAAn/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/9oA"
    "DgRDAE0AWQBLAAA/AFTFUKoqb//Z"
)
"""8×8, Adobe CMYK with cyan 0, magenta 255, yellow 255, black 0."""

PALETTE = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9)]


def tensorflow() -> Any:
    return load_backend()[0]


def colours(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def flat(height: int, width: int, *colour: int) -> np.ndarray:
    return np.tile(np.array(colour, np.uint8), (height, width, 1))


def encode(image: np.ndarray, file_format: str, **options: Any) -> bytes:
    """Return (h, w, c) pixels, or (h, w) indices into PALETTE, as a file."""
    file = io.BytesIO()
    _picture(image).save(file, file_format, **options)
    return file.getvalue()


def _picture(image: np.ndarray) -> Image.Image:
    if image.ndim == 2 and image.dtype != np.uint16:
        picture = Image.fromarray(image.astype(np.uint8))
        picture.putpalette([value for colour in PALETTE for value in colour])
        return picture
    return Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)


def png(image: np.ndarray, **options: Any) -> bytes:
    return encode(image, "PNG", **options)


def jpeg(image: np.ndarray) -> bytes:
    return encode(image, "JPEG", quality=100)


def bmp(image: np.ndarray) -> bytes:
    return encode(image, "BMP")


def gif(image: np.ndarray, *later: np.ndarray, **options: Any) -> bytes:
    more = {"save_all": True, "append_images": list(map(_picture, later))} if later else {}
    return encode(image, "GIF", **more, **options)


def huge_png(width: int, height: int) -> bytes:
    """Return a small file with a header that claims a large size."""
    small = png(flat(1, 1, 0, 0, 0))
    header = b"IHDR" + struct.pack(">II", width, height) + small[24:29]
    return small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]
