"""Arrays that people have already: .npy pairs, .npz archives, pairs of IDX files. They are taken as they are.

They are read a piece at a time, from compressed files too: memory does not grow with the data.
"""

import contextlib
import gzip
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from csdctl.worker.data.arrays import Array, as_labels, map_array
from csdctl.worker.data.element_spec import is_numeric
from csdctl.worker.ingest.sources.source import BLOCK_BYTES, Block
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec

NAMES = (("x", "y"), ("images", "labels"))
LABELS = ("y", "labels")


class Rows(Protocol):
    """An array on disk or in memory, read from its first row to its last."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def pieces(self, num_rows: int) -> Iterator[Array]:
        """All rows, `num_rows` at a time; raises OSError, ValueError, EOFError where the file is damaged."""


class InMemory:
    """Rows of an array that is there, or mapped."""

    def __init__(self, array: Array) -> None:
        self.shape: tuple[int, ...] = array.shape
        self.dtype = array.dtype
        self._array = array

    def pieces(self, num_rows: int) -> Iterator[Array]:
        """All rows, `num_rows` at a time."""
        for start in range(0, self.shape[0], num_rows):
            yield self._array[start : start + num_rows]


class _Streamed:
    """Rows that stand one behind the other in a file, behind a header."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _header_bytes: int

    def _open(self) -> contextlib.AbstractContextManager[IO[bytes]]:
        """The file from its beginning."""
        raise NotImplementedError

    def pieces(self, num_rows: int) -> Iterator[Array]:
        """All rows, `num_rows` at a time; raises EOFError when there are fewer, ValueError for more."""
        row_shape = self.shape[1:]
        row_bytes = self.dtype.itemsize * math.prod(row_shape)
        with self._open() as file:
            file.read(self._header_bytes)
            for start in range(0, self.shape[0], num_rows):
                count = min(num_rows, self.shape[0] - start)
                content = file.read(count * row_bytes)
                if len(content) != count * row_bytes:
                    raise EOFError("the array is cut short")
                yield np.frombuffer(content, self.dtype).reshape(count, *row_shape)
            if file.read(1):  # which also lets an archive compare its checksum
                raise ValueError("the array is longer than it says")


class IdxFile(_Streamed):
    """An IDX file of bytes, plain or gzip: magic 00 00 08 <dimensions>, big-endian sizes, data."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for another file, OSError and EOFError for one that cannot be read."""
        self._path = path
        with self._open() as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:3] != b"\0\0\x08":
                raise ValueError("not an IDX file of bytes")
            sizes = file.read(4 * magic[3])
        self._header_bytes = 4 + len(sizes)
        self.shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4", magic[3]))
        self.dtype = np.dtype(np.uint8)

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        if self._path.suffix == ".gz":
            with gzip.open(self._path) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            with self._path.open("rb") as file:
                yield file


class NpzMember(_Streamed):
    """One array of an .npz file. Never unpickles."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises ValueError, OSError or zipfile's errors when it cannot be read."""
        self._path = path
        self._name = name
        with self._open() as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            self.shape, self._is_fortran, self.dtype = read(file)
            self._header_bytes = file.tell()
        if self.dtype.hasobject:
            raise ValueError("an array of objects would have to be unpickled")

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        with zipfile.ZipFile(self._path) as archive, archive.open(f"{self._name}.npy") as file:
            yield file

    def pieces(self, num_rows: int) -> Iterator[Array]:
        """All rows, `num_rows` at a time."""
        if self._is_fortran:  # its rows do not stand one behind the other: this rare kind is loaded
            with np.load(self._path, allow_pickle=False) as archive:
                yield from InMemory(archive[self._name]).pieces(num_rows)
        else:
            yield from super().pieces(num_rows)


class Together:
    """Rows of several arrays, each an input of the model by its name, as one of records."""

    def __init__(self, parts: Mapping[str, Rows]) -> None:
        """Raises ValueError when they have not as many rows as each other."""
        if len({part.shape[:1] for part in parts.values()}) != 1:
            raise ValueError("arrays of different lengths")
        self._parts = dict(parts)
        self.shape: tuple[int, ...] = next(iter(parts.values())).shape[:1]
        self.dtype: np.dtype[Any] = np.dtype(
            [(name, part.dtype.newbyteorder("="), part.shape[1:]) for name, part in self._parts.items()]
        )

    def pieces(self, num_rows: int) -> Iterator[Array]:
        """All rows, `num_rows` at a time; raises what the arrays raise."""
        for several in zip(*(part.pieces(num_rows) for part in self._parts.values()), strict=True):
            made = np.empty(len(several[0]), self.dtype)
            for name, piece in zip(self._parts, several, strict=True):
                made[name] = piece
            yield made


class ArraySource:
    """Rows of images and rows of labels. Grey pictures, of shape (n, h, w), get a channel."""

    files_of_class: tuple[int, ...] = ()

    def __init__(self, images: Rows, labels: Rows, spec: PrepareSpec) -> None:
        """Raises WorkerError, exit code 2, when they are no samples or do not fit together."""
        check_arrays(images, labels, spec.source)
        self.class_names = spec.classes
        self.num_samples = images.shape[0]
        self.sample_bytes = images.dtype.itemsize * math.prod(images.shape[1:])
        self._images = images
        self._labels = labels
        self._source = spec.source

    def blocks(self, start: int) -> Iterator[Block]:
        """All rows from the one numbered `start` on."""
        num_rows = max(1, BLOCK_BYTES // max(1, self.sample_bytes))
        at = 0
        with readable(self._source):
            pieces = zip(self._images.pieces(num_rows), self._labels.pieces(num_rows), strict=True)
            for images, labels in pieces:
                skip = min(len(images), max(0, start - at))
                at += len(images)
                if skip < len(images):
                    yield _block(images[skip:], labels[skip:])


def _block(images: Array, labels: Array) -> Block:
    if images.ndim == 3:
        images = images[..., np.newaxis]
    native = images.astype(images.dtype.newbyteorder("="), copy=False)
    return Block(len(images), native, as_labels(labels))


def check_arrays(images: Rows, labels: Rows, source: str) -> None:
    """Raise WorkerError, exit code 2, unless they are samples and their labels."""
    if not images.shape or not labels.shape:
        raise WorkerError(f"data at {source} is one number, not samples", exit_code=2)
    if images.shape[0] == 0:
        raise empty(source)
    if images.shape[0] != labels.shape[0]:
        raise WorkerError(
            f"data at {source} does not fit together: {images.shape[0]} samples, {labels.shape[0]} labels",
            exit_code=2,
        )
    if not (is_numeric(images.dtype) and labels.dtype.kind in "uif"):
        raise WorkerError(f"data at {source} is not numeric: {images.dtype} and {labels.dtype}", exit_code=2)


def empty(source: str) -> WorkerError:
    """There is nothing at `source`."""
    return WorkerError(
        f"data at {source} is empty", remedy="add samples or remove it from job.yaml", exit_code=2
    )


@contextlib.contextmanager
def readable(source: str) -> Iterator[None]:
    """Turn what damaged files raise into a WorkerError, exit code 2, that names none of them."""
    try:
        yield
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise WorkerError(
            f"data at {source} cannot be read: {type(error).__name__}",
            remedy="replace the damaged file",
            exit_code=2,
        ) from None


def open_npy_pair(root: Path, spec: PrepareSpec) -> tuple[Array, Array]:
    """images.npy and labels.npy in `root`, mapped and checked."""
    if not ((root / "images.npy").exists() and (root / "labels.npy").exists()):
        raise WorkerError(
            f"data at {spec.source} lacks one of images.npy and labels.npy",
            remedy="add the other",
            exit_code=2,
        )
    with readable(spec.source):
        images, labels = map_array(root / "images.npy"), map_array(root / "labels.npy")
    check_arrays(InMemory(images), InMemory(labels), spec.source)
    return images, labels


def open_npy_files(root: Path, spec: PrepareSpec) -> ArraySource:
    """The same as a source, for what cannot serve as it is."""
    images, labels = open_npy_pair(root, spec)
    return ArraySource(InMemory(images), InMemory(labels), spec)


def open_npz(path: Path, spec: PrepareSpec) -> ArraySource:
    """The arrays x and y, or images and labels, of an .npz file; or y and one array for each input."""
    with readable(spec.source):
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
        for images, labels in NAMES:
            if f"{images}.npy" in members and f"{labels}.npy" in members:
                return ArraySource(NpzMember(path, images), NpzMember(path, labels), spec)
        names = [member.removesuffix(".npy") for member in members if member.endswith(".npy")]
        found = [name for name in LABELS if name in names]
        if len(found) == 1 and len(names) > 1:
            inputs = {name: NpzMember(path, name) for name in sorted(names) if name not in found}
            return ArraySource(Together(inputs), NpzMember(path, found[0]), spec)
    raise WorkerError(
        f"the .npz at {spec.source} has no arrays x and y (or images and labels)",
        remedy="for a model with several inputs: y, and an array for each input by its name",
        exit_code=2,
    )


def open_idx_pair(images: Path, labels: Path, spec: PrepareSpec) -> ArraySource:
    """A file of images and one of labels."""
    with readable(spec.source):
        return ArraySource(IdxFile(images), IdxFile(labels), spec)
