"""Images: folders by class, and conversion to uint8 of a fixed shape (docs/how-to/prepare-data.md).

Pillow reads sizes from headers before anything is decoded. It reads bytes, never a path, so that none of its
errors can name a file. Its results are the same on every machine.
"""

import io
import math
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources import source as sources
from csdctl.worker.ingest.sources.source import Candidate, DataFile, Tree, UnusableError, data_error
from csdctl.worker.process.errors import JobError, describe
from csdctl.worker.protocol.datasets import ImageRule, PrepareSpec, list_names

LARGE_PIXELS = 16_000_000
"""Images with more pixels are decoded one at a time, whatever the number of threads, to save memory."""
SPARE_SCALE = 2
"""Images are first reduced by an integer factor, to no less than this multiple of the final size."""
MAGIC = {
    b"\x89PNG\r\n\x1a\n": "Png",
    b"\xff\xd8\xff": "Jpeg",
    b"GIF87a": "Gif",
    b"GIF89a": "Gif",
    b"BM": "Bmp",
}
"""Formats, as Pillow's plugins are called, by the first bytes of a file."""
ORIENTATION = 0x0112
"""The EXIF tag that says how a picture is turned: from 5 on, width and height are stored swapped."""
PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}
"""Folders that are parts of a data set, not classes, unless the job lists them as classes."""


def known_shape(rule: ImageRule) -> tuple[int, ...] | None:
    """Return the rule's (height, width, channels) if it has all three, else None."""
    return rule.shape if rule.shape and len(rule.shape) == 3 and 0 not in rule.shape else None


def open_image(content: bytes) -> Any:
    """Return Pillow's image, not decoded yet, None for other formats. Raises ValueError if it is damaged."""
    name = next((name for magic, name in MAGIC.items() if content.startswith(magic)), "")
    if not name:
        return None
    if name == "Png":
        content = _strip_ancillary_chunks(content)
    # Not Image.open: its limit of pixels is not the one of the job.
    reader = getattr(getattr(_import_pillow(), f"{name}ImagePlugin"), f"{name}ImageFile")
    try:
        return reader(io.BytesIO(content))
    except MemoryError:
        raise
    except Exception:  # they are of many types
        raise ValueError(f"{name} is damaged") from None


def _strip_ancillary_chunks(png: bytes) -> bytes:
    """Return a PNG without what its pixels do not need: Pillow refuses damage there, and long text."""
    kept, start = [png[:8]], 8
    while start < len(png):
        end = start + 12 + int.from_bytes(png[start : start + 4])  # length, name, data, checksum
        if not png[start + 4 : start + 5].islower() or png[start + 4 : start + 8] == b"tRNS":
            kept.append(png[start:end])
        start = end
    return b"".join(kept)


def upright_size(image: Any) -> tuple[int, int]:
    """Return height and width of Pillow's image, as it is seen."""
    width, height = image.size
    with suppress(Exception):  # damage of the EXIF data does not matter
        if image.format == "JPEG" and 5 <= image.getexif().get(ORIENTATION, 1) <= 8:
            return width, height
    return height, width


def _import_pillow() -> Any:
    try:
        import PIL
        from PIL import Image, ImageOps  # noqa: F401
    except ImportError as error:
        problem = f"has no Pillow, which reads images: {describe(error)}"
        raise JobError(problem, "install the package pillow there") from None
    Image.preinit()  # imports the plugins of these formats
    return PIL


class ImageDecoder:
    """Decodes images and fits them to the shape of a rule. Thread-safe."""

    def __init__(self, rule: ImageRule) -> None:
        """Raise WorkerError, exit code 2, for a shape that images cannot have."""
        shape = known_shape(rule)
        if shape is None or shape[2] not in (1, 3):
            problem = f"images cannot be converted to samples of shape {rule.shape}"
            raise JobError(problem, "set data.image.shape in job.yaml: [height, width, 1 or 3]")
        self._pillow = _import_pillow()
        self._shape = shape
        self._size = (shape[1], shape[0])
        self.sample_bytes = math.prod(shape)
        self._rule = rule
        self._large_image = threading.Lock()

    def decode(self, content: bytes) -> Array:
        """Return the image encoded in `content` as uint8 of the rule's shape. Raises UnusableError."""
        try:
            image = open_image(content)
            if image is None:
                raise UnusableError("other_format" if content else "undecodable")
            num_pixels = math.prod(image.size)
            if num_pixels > self._rule.max_pixels:
                raise UnusableError("too_large")
            with self._large_image if num_pixels > LARGE_PIXELS else nullcontext():
                return self._fit(self._load(image))
        except (UnusableError, MemoryError):
            raise
        except Exception:  # Pillow's are of many types
            raise UnusableError("undecodable") from None

    def fit(self, image: Array) -> Array:
        """Return uint8 (h, w, c) as uint8 of the rule's shape. Raises UnusableError unless c is 1 to 4."""
        if 0 in image.shape or image.shape[2] > 4:
            raise UnusableError("undecodable")
        return self._fit(self._pillow.Image.fromarray(image[..., 0] if image.shape[2] == 1 else image))

    def _load(self, image: Any) -> Any:
        if image.format == "JPEG":
            # The decoder itself reduces the image, which saves most work.
            image.draft("RGB", [SPARE_SCALE * max(self._size)] * 2)
        image.load()
        if image.format == "JPEG":
            try:
                return self._pillow.ImageOps.exif_transpose(image)
            except MemoryError:
                raise
            except Exception:  # damage of the EXIF data does not matter
                return image
        if image.format == "BMP":  # its fourth byte is rarely alpha
            return image.convert("RGB")
        if image.mode.startswith("I;16"):  # of which convert() keeps the lower bits
            pixels, key = np.asarray(image), image.info.get("transparency")
            grey = np.stack([pixels >> 8, np.where(pixels == key, 0, 255)], axis=-1)
            return self._pillow.Image.fromarray(grey.astype(np.uint8))
        return image

    def _fit(self, picture: Any) -> Array:
        """Return a picture in the final size and channels, with white in place of what is transparent."""
        if picture.has_transparency_data:
            layer = picture.convert("RGBA")
            picture = self._pillow.Image.new("RGB", layer.size, "white")
            picture.paste(layer.convert("RGB"), mask=layer.getchannel("A"))
        picture = picture.convert("L" if self._shape[2] == 1 else "RGB")
        resize = {"stretch": self._stretch, "crop": self._crop, "pad": self._pad}[self._rule.fit]
        return np.asarray(resize(picture, self._size)).reshape(self._shape)

    def _stretch(self, picture: Any, size: tuple[int, int]) -> Any:
        return picture.resize(size, self._pillow.Image.Resampling.BILINEAR, reducing_gap=SPARE_SCALE)

    def _crop(self, picture: Any, size: tuple[int, int]) -> Any:
        scale = min(picture.width / size[0], picture.height / size[1])
        width, height = (max(1, round(side * scale)) for side in size)
        x, y = (picture.width - width) // 2, (picture.height - height) // 2
        return self._stretch(picture.crop((x, y, x + width, y + height)), size)

    def _pad(self, picture: Any, size: tuple[int, int]) -> Any:
        scale = min(size[0] / picture.width, size[1] / picture.height)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        padded = self._pillow.Image.new(picture.mode, size, "white")
        corner = (size[0] - width) // 2, (size[1] - height) // 2
        padded.paste(self._stretch(picture, (width, height)), corner)
        return padded


class ClassFolders(sources.DecodedSource):
    """Images in class folders, class by class and sorted by path."""

    def __init__(self, tree: Tree, spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, for a folder that is not one of the job's classes."""
        if spec.classes is None and not spec.names_classes:
            problem = "consists of class folders, but the job does not list its classes"
            remedy = "list them as data.classes in job.yaml, or use public data of class folders"
            raise data_error(spec.source, problem, remedy)
        super().__init__(spec)
        names = spec.classes or tuple(sorted(_normalize(name) for name in tree.folders))
        self.class_names = names
        self._label_of = {_normalize(name): label for label, name in enumerate(names)}
        _check_folders(tree, self._label_of, spec)
        self._tree = tree
        self._rule = spec.picture
        self._files = sorted(tree.files, key=self._label)  # stable: sorted by path within a class
        counts = Counter(map(self._label, self._files))
        self.files_of_class = tuple(counts[label] for label in range(len(names)))
        self.num_samples = len(self._files)
        self._decoder = ImageDecoder(spec.picture)
        self.sample_bytes = self._decoder.sample_bytes

    def candidates(self) -> Iterator[Candidate]:
        """Yield all files."""
        return ((file, self._label(file)) for file in self._files)

    def _label(self, file: DataFile) -> int:
        """Return the index of the file's class. Files beside the class folders come last."""
        return self._label_of[_normalize(file.parts[0])] if len(file.parts) > 1 else len(self._label_of)

    def decode(self, file: DataFile, label: int) -> tuple[Array, Any]:
        """Return the picture and its class. Raises UnusableError."""
        if len(file.parts) == 1:
            raise UnusableError("no_class")
        if file.size > self._rule.max_bytes:
            raise UnusableError("too_large")
        try:
            content = self._tree.path_of(file).read_bytes()
        except OSError:
            raise UnusableError("unreadable") from None
        return self._decoder.decode(content), np.int32(label)

    def place_of(self, candidate: Candidate, number: int) -> str:
        """Return the path of a file below the root."""
        return "/".join(candidate[0].parts)


def _normalize(folder: str) -> str:
    """Return the NFC form of a name: some file systems store letters and accents separately."""
    return unicodedata.normalize("NFC", folder)


def _check_folders(tree: Tree, label_of: dict[str, int], spec: PrepareSpec) -> None:
    source, folders = spec.source, tree.folders
    if spec.classes is None and folders and {name.lower() for name in folders} <= PARTS:
        training = next((name for name in folders if name.lower().startswith("train")), folders[0])
        problem = f"has the folders {', '.join(folders)}, which are data sets, not classes"
        remedy = f"data.public.path: {Path(source, training)}; another one as data.validation.path"
        raise data_error(source, problem, remedy)
    num_nested = sum(len(file.parts) > 2 for file in tree.files)
    if spec.classes is None and len(folders) == 1 and 2 * num_nested > len(tree.files):
        problem = f"has a single class, {folders[0]}, whose files are in folders of their own"
        remedy = f"if these are the classes, data.public.path: {Path(source, folders[0])}; "
        raise data_error(source, problem, f"{remedy}else data.classes: [{folders[0]}]")
    unprintable = [name for name in folders if not name.isprintable()]
    if unprintable:
        problem = f"has a class folder with an unprintable name, {unprintable[0]!a}"
        raise data_error(source, problem, "rename the folder")
    unknown = [name for name in folders if _normalize(name) not in label_of]
    if unknown:
        named = f"{'classes' if len(unknown) > 1 else 'class'} {list_names(unknown)}"
        problem = f"has {named}, not among the job's {len(label_of)} classes"
        raise data_error(source, problem, "add it to data.classes in job.yaml, or rename the folder")
