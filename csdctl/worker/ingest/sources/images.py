"""Images: folders by class, and conversion to uint8 of a fixed shape (docs/how-to/prepare-data.md).

Pillow reads sizes from headers before anything is decoded, and decodes GIF and BMP. TensorFlow decodes PNG
and JPEG. Both read bytes, never a path, so that none of their errors or messages can name a file.
"""

import io
import struct
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_tensorflow
from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources.source import (
    Block,
    DataFile,
    EncodedSample,
    IngestLimits,
    SampleSource,
    Tree,
    UnusableError,
    data_error,
    decode_blocks,
    list_names,
)
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.datasets import ImageRule, PrepareSpec

LARGE_PIXELS = 16_000_000
"""Images with more pixels are decoded one at a time, whatever the number of threads, to save memory."""

SPARE_SCALE = 2
"""Images are first reduced by an integer factor, to no less than this multiple of the final size."""

_STRIP_PIXELS = 1 << 16
"""Small enough for intermediate results to fit a processor's cache."""

_WHITE = 255
_FORMATS = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"BM": "bmp",
}
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, LookupError, EOFError, OverflowError, TypeError)


def known_shape(rule: ImageRule) -> tuple[int, int, int] | None:
    """Return the rule's (height, width, channels) if it has all three, else None."""
    if rule.shape is None or len(rule.shape) != 3 or 0 in rule.shape:
        return None
    height, width, channels = rule.shape
    return height, width, channels


@dataclass(frozen=True)
class Header:
    """Format of an image ('png', 'jpeg', 'bmp', 'gif') and its size in pixels."""

    format: str
    width: int
    height: int
    opened: Any = None
    """Pillow's image, not decoded yet; None for a PNG."""


def read_header(content: bytes) -> Header | None:
    """Return the header of an encoded image, None for other formats; raises ValueError if it is damaged."""
    name = next((name for magic, name in _FORMATS.items() if content.startswith(magic)), "")
    if not name:
        return None
    opened = None
    try:
        if name == "png":  # Pillow refuses a PNG for damage that does not matter, as that of a comment
            kind, width, height = struct.unpack_from(">4sII", content, 12)
            if kind != b"IHDR":
                raise ValueError
        else:
            # Not Image.open: its limit of pixels is not the one of the job.
            opened = _import_pillow()[name](io.BytesIO(content))
            width, height = opened.size
    except WorkerError:
        raise
    except Exception:  # Pillow's are of many types
        raise ValueError(f"{name} is damaged") from None
    if width < 1 or height < 1:
        raise ValueError(f"{name} without pixels")
    return Header(name, width, height, opened)


def _import_pillow() -> dict[str, Any]:
    try:
        from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin
    except ImportError as error:
        raise WorkerError(
            f"has no Pillow, which reads images: {describe(error)}",
            remedy="install the package pillow there",
            exit_code=2,
        ) from None
    return {
        "jpeg": JpegImagePlugin.JpegImageFile,
        "gif": GifImagePlugin.GifImageFile,
        "bmp": BmpImagePlugin.BmpImageFile,
    }


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
        _import_pillow()
        self._height, self._width, self._channels = shape
        self._rule = rule
        self._tf = tf
        self._large_image = threading.Lock()

    def decode(self, content: bytes) -> Array:
        """Return the image encoded in `content` as uint8 of the rule's shape; raises UnusableError."""
        try:
            header = read_header(content)
            if header is None:
                raise UnusableError("other_format" if content else "undecodable")
            num_pixels = header.width * header.height
            if num_pixels > self._rule.max_pixels:
                raise UnusableError("too_large")
            with self._large_image if num_pixels > LARGE_PIXELS else nullcontext():
                return self.fit(self._decode_format(content, header))
        except (self._tf.errors.OpError, *_DECODER_ERRORS):
            raise UnusableError("undecodable") from None

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
        if header.format == "png":
            return np.asarray(self._tf.io.decode_png(content, channels=0))
        if header.format == "jpeg":
            # The decoder itself reduces the image, which saves most work.
            spare = min(header.height / self._height, header.width / self._width) / SPARE_SCALE
            ratio = next((ratio for ratio in (8, 4, 2) if ratio <= spare), 1)
            jpeg = self._tf.io.decode_jpeg(content, channels=3, ratio=ratio, dct_method="INTEGER_ACCURATE")
            return np.asarray(jpeg)
        if header.format == "bmp":  # its fourth byte is rarely alpha
            return np.asarray(header.opened.convert("RGB"))
        left, top, right, bottom = header.opened.tile[0][1]  # the first frame, within the screen
        return np.asarray(header.opened.convert("RGBA"))[top:bottom, left:right]

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


BYTES_PER_PIXEL = 8
"""Upper limit of the file size of an image, per pixel: 16 bits in four channels."""

_SPARE_BYTES = 1 << 20


class ClassFolders(SampleSource):
    """Images in class folders, class by class and sorted by path."""

    def __init__(self, tree: Tree, spec: PrepareSpec, threads: int) -> None:
        """Raise WorkerError, exit code 2, for a folder that is not one of the job's classes."""
        if spec.classes is None and not spec.names_classes:
            problem = "consists of class folders, but the job does not list its classes"
            remedy = "list them as data.classes in job.yaml, or use public data of class folders"
            raise data_error(spec.source, problem, remedy)
        super().__init__(spec)
        names = spec.classes or tuple(sorted(_normalize(name) for name in tree.folders))
        self.class_names = names
        self._label_of = {_normalize(name): label for label, name in enumerate(names)}
        _check_folders(tree.folders, self._label_of, spec.source)
        self._tree = tree
        self._threads = threads
        self._rule = spec.picture
        self._files = sorted(tree.files, key=self._label)  # stable: sorted by path within a class
        counts = Counter(map(self._label, self._files))
        self.files_of_class = tuple(counts[label] for label in range(len(names)))
        self.num_samples = len(self._files)
        self._decoder = ImageDecoder(spec.picture, load_tensorflow())
        self.sample_bytes = self._decoder.sample_bytes

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all images from index `start` on."""
        candidates = (EncodedSample(file, self._label(file)) for file in self._files[start:])
        return decode_blocks(
            candidates, self._decode, limits, threads=self._threads, sample_bytes=self.sample_bytes
        )

    def _label(self, file: DataFile) -> int:
        """Return the index of the file's class; files beside the class folders come last."""
        return self._label_of[_normalize(file.parts[0])] if len(file.parts) > 1 else len(self._label_of)

    def _decode(self, candidate: EncodedSample) -> tuple[Array, Any]:
        file: DataFile = candidate.content
        if len(file.parts) == 1:
            raise UnusableError("no_class")
        if file.size > BYTES_PER_PIXEL * self._rule.max_pixels + _SPARE_BYTES:
            raise UnusableError("too_large")
        try:
            content = self._tree.path_of(file).read_bytes()
        except OSError:
            raise UnusableError("unreadable") from None
        return self._decoder.decode(content), candidate.label


def _normalize(folder: str) -> str:
    """Return the NFC form of a name: some file systems store letters and accents separately."""
    return unicodedata.normalize("NFC", folder)


def _check_folders(folders: Sequence[str], label_of: dict[str, int], source: str) -> None:
    unprintable = [name for name in folders if not name.isprintable()]
    if unprintable:
        problem = f"has a class folder with an unprintable name, {unprintable[0]!a}"
        raise data_error(source, problem, "rename the folder")
    unknown = [name for name in folders if _normalize(name) not in label_of]
    if unknown:
        named = f"{'classes' if len(unknown) > 1 else 'class'} {list_names(unknown)}"
        problem = f"has {named}, not among the job's {len(label_of)} classes"
        raise data_error(source, problem, "add it to data.classes in job.yaml, or rename the folder")
