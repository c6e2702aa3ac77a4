"""From an encoded picture to uint8 of one fixed shape, by the rules of docs/how-to/prepare-data.md.

TensorFlow decodes, from bytes and never from a path, so that no error or message of its own can name a file.
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
"""Pictures with more are decoded one at a time, whatever the number of threads: for the memory."""

SPARE_SCALE = 2
"""A picture is made smaller in whole steps first, to no less than this many times its final size."""

_STRIP_PIXELS = 1 << 16
"""Small enough for what is computed of it to stay in a processor's cache."""

_WHITE = 255


def known_shape(rule: ImageRule) -> tuple[int, int, int] | None:
    """The rule's (height, width, channels) when it says all three, else None."""
    if rule.shape is None or len(rule.shape) != 3 or 0 in rule.shape:
        return None
    height, width, channels = rule.shape
    return height, width, channels


class PictureDecoder:
    """Decodes and fits pictures; may be used by many threads at once."""

    def __init__(self, rule: ImageRule, tf: Any) -> None:
        """Raises WorkerError, exit code 2, for a shape that pictures cannot have."""
        shape = known_shape(rule)
        if shape is None or shape[2] not in (1, 3):
            raise WorkerError(
                f"pictures cannot become samples of shape {rule.shape}",
                remedy="say data.image.shape in job.yaml: [height, width, 1 or 3]",
                exit_code=2,
            )
        self._height, self._width, self._channels = shape
        self._rule = rule
        self._tf = tf
        self._one_large = threading.Lock()

    def decode(self, content: bytes) -> Array:
        """The picture encoded in `content` as uint8 of the rule's shape; raises UnusableError."""
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
            return self._decode_known(content, header)
        with self._one_large:
            return self._decode_known(content, header)

    @property
    def sample_bytes(self) -> int:
        """Of one picture as it becomes."""
        return self._height * self._width * self._channels

    def fit(self, picture: Array) -> Array:
        """uint8 (h, w, c) as uint8 of the rule's shape; raises UnusableError unless c is 1 to 4."""
        if 0 in picture.shape or picture.shape[2] > 4:
            raise UnusableError("undecodable")
        if picture.shape == (self._height, self._width, self._channels):
            return picture
        if self._rule.fit == "crop":
            picture = self._crop(picture)
        height, width = self._height, self._width
        if self._rule.fit == "pad":
            scale = min(height / picture.shape[0], width / picture.shape[1])
            height = max(1, min(height, round(picture.shape[0] * scale)))
            width = max(1, min(width, round(picture.shape[1] * scale)))
        small = self._resize(_reduce(picture, height, width, self._channels), height, width)
        if small.shape[:2] == (self._height, self._width):
            return small
        padded = np.full((self._height, self._width, self._channels), _WHITE, np.uint8)
        top, left = (self._height - height) // 2, (self._width - width) // 2
        padded[top : top + height, left : left + width] = small
        return padded

    def _decode_known(self, content: bytes, header: Header) -> Array:
        io = self._tf.io
        try:
            if header.kind == "png":
                picture = io.decode_png(content, channels=0)
            elif header.kind == "jpeg":
                picture = io.decode_jpeg(
                    content, channels=3, ratio=self._jpeg_ratio(header), dct_method="INTEGER_ACCURATE"
                )
            elif header.kind == "gif":
                picture = io.decode_image(first_frame(content), channels=3, expand_animations=False)
            else:
                picture = _colour_bmp(content, np.asarray(io.decode_bmp(content, channels=0)))
            return self.fit(np.asarray(picture))
        except (self._tf.errors.OpError, ValueError, IndexError, struct.error):
            raise UnusableError("undecodable") from None

    def _jpeg_ratio(self, header: Header) -> int:
        """How far the decoder itself makes a JPEG smaller, which saves most of its work."""
        spare = min(header.height / self._height, header.width / self._width) / SPARE_SCALE
        return next((ratio for ratio in (8, 4, 2) if ratio <= spare), 1)

    def _crop(self, picture: Array) -> Array:
        """The largest part from the middle that has the proportions of the final shape."""
        height, width = picture.shape[:2]
        wanted_width = max(1, min(width, round(height * self._width / self._height)))
        wanted_height = max(1, min(height, round(width * self._height / self._width)))
        top, left = (height - wanted_height) // 2, (width - wanted_width) // 2
        return picture[top : top + wanted_height, left : left + wanted_width]

    def _resize(self, picture: Array, height: int, width: int) -> Array:
        if picture.shape[:2] == (height, width):
            return picture
        resized = self._tf.image.resize(picture, (height, width), method="bilinear", antialias=True)
        rounded: Array = np.clip(np.rint(np.asarray(resized)), 0, 255).astype(np.uint8)
        return rounded


def _reduce(picture: Array, height: int, width: int, channels: int) -> Array:
    """`picture` in the final channels, each square of so many pixels as can be spared as its mean.

    In strips of rows, so that a large picture takes no more memory than it has. What is left over at the
    right and the lower edge is less than half a pixel of the final picture.
    """
    step = max(1, min(picture.shape[0] // height, picture.shape[1] // width) // SPARE_SCALE)
    num_rows, num_columns = picture.shape[0] // step, picture.shape[1] // step
    reduced = np.empty((num_rows, num_columns, channels), np.uint8)
    strip_rows = max(1, _STRIP_PIXELS // (picture.shape[1] * step))
    for start in range(0, num_rows, strip_rows):
        stop = min(num_rows, start + strip_rows)
        strip = _in_channels(picture[start * step : stop * step, : num_columns * step], channels)
        reduced[start:stop] = _mean_of_squares(strip, step) if step > 1 else strip
    return reduced


def _mean_of_squares(strip: Array, step: int) -> Array:
    height, width, channels = strip.shape
    rows = strip.reshape(height // step, step, width * channels).sum(axis=1, dtype=np.uint32)
    squares = rows.reshape(height // step, width // step, step, channels).sum(axis=2, dtype=np.uint32)
    mean: Array = (squares + step * step // 2) // (step * step)
    return mean


def _in_channels(strip: Array, channels: int) -> Array:
    """Grey, grey with alpha, RGB or RGBA as grey or RGB; what is transparent becomes white."""
    if strip.shape[2] in (2, 4):
        alpha = strip[..., -1:].astype(np.uint16)
        blended = strip[..., :-1] * alpha
        blended += _WHITE * (255 - alpha) + 128
        blended += blended >> 8  # this and the next line: divided by 255 and rounded, without a division
        blended >>= 8
        strip = blended.astype(np.uint8)
    if strip.shape[2] == channels:
        return strip
    if channels == 3:
        return np.repeat(strip, 3, axis=2)
    weights = np.array([299, 587, 114], np.uint32)  # ITU-R BT.601
    return ((strip @ weights + 500) // 1000).astype(np.uint8)[..., np.newaxis]


def _colour_bmp(content: bytes, picture: Array) -> Array:
    """A BMP as RGB: the decoder gives a palette's numbers, and a fourth byte that is seldom alpha."""
    if picture.shape[2] != 1:
        return picture[..., :3]
    (header_bytes,) = struct.unpack_from("<I", content, 14)
    (num_colours,) = struct.unpack_from("<I", content, 46)
    palette = np.frombuffer(content, np.uint8, 4 * (num_colours or 256), 14 + header_bytes).reshape(-1, 4)
    if picture.max() >= len(palette):
        raise ValueError("bmp with numbers beyond its palette")
    return palette[picture[..., 0]][..., 2::-1]
