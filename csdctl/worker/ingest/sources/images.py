"""Conversion of an encoded image to uint8 of a fixed shape, by the rules of docs/how-to/prepare-data.md.

TensorFlow decodes from bytes, never from a path, so that none of its errors or messages can name a file.
"""

import struct
import threading
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources.gif import first_frame
from csdctl.worker.ingest.sources.headers import Header, read_header
from csdctl.worker.ingest.sources.source import UnusableError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import ImageRule

LARGE_PIXELS = 16_000_000
"""Images with more pixels are decoded one at a time, whatever the number of threads, to save memory."""

SPARE_SCALE = 2
"""Images are first reduced by an integer factor, to no less than this multiple of the final size."""

_STRIP_PIXELS = 1 << 16
"""Small enough for intermediate results to fit a processor's cache."""

_WHITE = 255


def known_shape(rule: ImageRule) -> tuple[int, int, int] | None:
    """Return the rule's (height, width, channels) if it has all three, else None."""
    if rule.shape is None or len(rule.shape) != 3 or 0 in rule.shape:
        return None
    height, width, channels = rule.shape
    return height, width, channels


class ImageDecoder:
    """Decodes images and fits them to the shape of a rule; thread-safe."""

    def __init__(self, rule: ImageRule, tf: Any) -> None:
        """Raise WorkerError, exit code 2, for a shape that images cannot have."""
        shape = known_shape(rule)
        if shape is None or shape[2] not in (1, 3):
            raise WorkerError(
                f"images cannot be converted to samples of shape {rule.shape}",
                remedy="set data.image.shape in job.yaml: [height, width, 1 or 3]",
                exit_code=2,
            )
        self._height, self._width, self._channels = shape
        self._rule = rule
        self._tf = tf
        self._large_image = threading.Lock()

    def decode(self, content: bytes) -> Array:
        """Return the image encoded in `content` as uint8 of the rule's shape; raises UnusableError."""
        try:
            header = read_header(content)
        except ValueError:
            raise UnusableError("undecodable") from None
        if header is None:
            raise UnusableError("other_format" if content else "undecodable")
        num_pixels = header.width * header.height
        if num_pixels > self._rule.max_pixels:
            raise UnusableError("too_large")
        if num_pixels <= LARGE_PIXELS:
            return self._decode_format(content, header)
        with self._large_image:
            return self._decode_format(content, header)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one converted image."""
        return self._height * self._width * self._channels

    def fit(self, image: Array) -> Array:
        """Return uint8 (h, w, c) as uint8 of the rule's shape; raises UnusableError unless c is 1 to 4."""
        if 0 in image.shape or image.shape[2] > 4:
            raise UnusableError("undecodable")
        if image.shape == (self._height, self._width, self._channels):
            return image
        if self._rule.fit == "crop":
            image = self._crop(image)
        height, width = self._height, self._width
        if self._rule.fit == "pad":
            scale = min(height / image.shape[0], width / image.shape[1])
            height = max(1, min(height, round(image.shape[0] * scale)))
            width = max(1, min(width, round(image.shape[1] * scale)))
        resized = self._resize(_reduce(image, height, width, self._channels), height, width)
        if resized.shape[:2] == (self._height, self._width):
            return resized
        padded = np.full((self._height, self._width, self._channels), _WHITE, np.uint8)
        top, left = (self._height - height) // 2, (self._width - width) // 2
        padded[top : top + height, left : left + width] = resized
        return padded

    def _decode_format(self, content: bytes, header: Header) -> Array:
        io = self._tf.io
        try:
            if header.format == "png":
                image = io.decode_png(content, channels=0)
            elif header.format == "jpeg":
                image = io.decode_jpeg(
                    content, channels=3, ratio=self._jpeg_ratio(header), dct_method="INTEGER_ACCURATE"
                )
            elif header.format == "gif":
                image = io.decode_image(first_frame(content), channels=3, expand_animations=False)
            else:
                image = _bmp_to_rgb(content, np.asarray(io.decode_bmp(content, channels=0)))
            return self.fit(np.asarray(image))
        except (self._tf.errors.OpError, ValueError, IndexError, struct.error):
            raise UnusableError("undecodable") from None

    def _jpeg_ratio(self, header: Header) -> int:
        """Return the factor by which the JPEG decoder itself reduces the image, which saves most work."""
        spare = min(header.height / self._height, header.width / self._width) / SPARE_SCALE
        return next((ratio for ratio in (8, 4, 2) if ratio <= spare), 1)

    def _crop(self, image: Array) -> Array:
        """Return the largest centred part with the aspect ratio of the final shape."""
        height, width = image.shape[:2]
        cropped_width = max(1, min(width, round(height * self._width / self._height)))
        cropped_height = max(1, min(height, round(width * self._height / self._width)))
        top, left = (height - cropped_height) // 2, (width - cropped_width) // 2
        return image[top : top + cropped_height, left : left + cropped_width]

    def _resize(self, image: Array, height: int, width: int) -> Array:
        if image.shape[:2] == (height, width):
            return image
        resized = self._tf.image.resize(image, (height, width), method="bilinear", antialias=True)
        rounded: Array = np.clip(np.rint(np.asarray(resized)), 0, 255).astype(np.uint8)
        return rounded


def _reduce(image: Array, height: int, width: int, channels: int) -> Array:
    """Return `image` in the final channels, reduced by the largest integer factor that leaves SPARE_SCALE.

    Each square of pixels becomes its mean. Works in strips of rows, so that a large image needs no memory
    beyond its own. What remains at the right and lower edges is less than half a pixel of the final image.
    """
    factor = max(1, min(image.shape[0] // height, image.shape[1] // width) // SPARE_SCALE)
    num_rows, num_columns = image.shape[0] // factor, image.shape[1] // factor
    reduced = np.empty((num_rows, num_columns, channels), np.uint8)
    strip_rows = max(1, _STRIP_PIXELS // (image.shape[1] * factor))
    for start in range(0, num_rows, strip_rows):
        stop = min(num_rows, start + strip_rows)
        strip = _to_channels(image[start * factor : stop * factor, : num_columns * factor], channels)
        reduced[start:stop] = _mean_of_squares(strip, factor) if factor > 1 else strip
    return reduced


def _mean_of_squares(strip: Array, factor: int) -> Array:
    height, width, channels = strip.shape
    rows = strip.reshape(height // factor, factor, width * channels).sum(axis=1, dtype=np.uint32)
    squares = rows.reshape(height // factor, width // factor, factor, channels).sum(axis=2, dtype=np.uint32)
    mean: Array = (squares + factor * factor // 2) // (factor * factor)
    return mean


def _to_channels(strip: Array, channels: int) -> Array:
    """Convert grayscale or RGB, with or without alpha, to grayscale or RGB on a white background."""
    if strip.shape[2] in (2, 4):
        alpha = strip[..., -1:].astype(np.uint16)
        blended = strip[..., :-1] * alpha
        blended += _WHITE * (255 - alpha) + 128
        blended += blended >> 8  # this and the next line divide by 255 with rounding, without a division
        blended >>= 8
        strip = blended.astype(np.uint8)
    if strip.shape[2] == channels:
        return strip
    if channels == 3:
        return np.repeat(strip, 3, axis=2)
    weights = np.array([299, 587, 114], np.uint32)  # ITU-R BT.601
    return ((strip @ weights + 500) // 1000).astype(np.uint8)[..., np.newaxis]


def _bmp_to_rgb(content: bytes, image: Array) -> Array:
    """Convert a decoded BMP to RGB: TensorFlow returns palette indices, and a fourth byte, rarely alpha."""
    if image.shape[2] != 1:
        return image[..., :3]
    (header_bytes,) = struct.unpack_from("<I", content, 14)
    (num_colours,) = struct.unpack_from("<I", content, 46)
    palette = np.frombuffer(content, np.uint8, 4 * (num_colours or 256), 14 + header_bytes).reshape(-1, 4)
    if image.max() >= len(palette):
        raise ValueError("BMP with indices beyond its palette")
    return palette[image[..., 0]][..., 2::-1]
