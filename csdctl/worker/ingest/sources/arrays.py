"""Existing arrays: .npy pairs, .npz archives, pairs of IDX files. Their values stay unchanged.

Files are read in chunks, compressed ones too: memory use does not grow with the data.
"""

import contextlib
import gzip
import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from csdctl.worker.data.arrays import Array, as_labels, as_samples, is_numeric, map_array, read_array_header
from csdctl.worker.ingest.sources.source import Block, IngestLimits
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import DAMAGED_ARCHIVE, BoundedFile
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec

_PIECE_BYTES = 64 << 20
"""More than a block of rows has, unless a single row is larger."""


class Rows(Protocol):
    """An array on disk or in memory, read from its first row to its last."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows, `num_rows` at a time; raises OSError, ValueError, EOFError for damaged files."""


class InMemoryRows:
    """Rows of an array in memory, or of a memory map."""

    def __init__(self, array: Array) -> None:
        self.shape: tuple[int, ...] = array.shape
        self.dtype = array.dtype
        self._array = array

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows, `num_rows` at a time."""
        for start in range(0, self.shape[0], num_rows):
            yield self._array[start : start + num_rows]


class _StreamedRows:
    """Rows stored one after another in a file, after a header."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _header_bytes: int

    def _open(self) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open the file at its beginning."""
        raise NotImplementedError

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows, `num_rows` at a time; raises EOFError for too few, ValueError for extra data."""
        row_shape = self.shape[1:]
        row_bytes = self.dtype.itemsize * math.prod(row_shape)
        with self._open() as file:
            file.read(self._header_bytes)
            for start in range(0, self.shape[0], num_rows):
                count = min(num_rows, self.shape[0] - start)
                content = _read(file, count * row_bytes)
                if len(content) != count * row_bytes:
                    raise EOFError("the array is truncated")
                yield np.frombuffer(content, self.dtype).reshape(count, *row_shape)
            if file.read(1):  # reading to the end also makes an archive check its CRC
                raise ValueError("the array is longer than its header says")


def _read(file: IO[bytes], num_bytes: int) -> bytes:
    """Return up to `num_bytes`; reserves no memory for more than the file has, whatever its header says."""
    pieces = []
    while num_bytes and (piece := file.read(min(num_bytes, _PIECE_BYTES))):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


class IdxFile(_StreamedRows):
    """An IDX file of bytes, plain or gzip: magic 00 00 08 <dimensions>, big-endian sizes, data."""

    def __init__(self, path: Path) -> None:
        """Raise ValueError for another format, OSError or EOFError if the file cannot be read."""
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


class NpzMember(_StreamedRows):
    """One array of an .npz file. Never unpickles."""

    def __init__(self, path: Path, name: str) -> None:
        """Raise ValueError, OSError or an error of zipfile if it cannot be read."""
        self._path = path
        self._name = name
        with self._open() as file:
            self.shape, self._is_fortran, self.dtype = read_array_header(file)
            self._header_bytes = file.tell()

    @contextlib.contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        with (
            BoundedFile(io.FileIO(self._path)) as whole,
            zipfile.ZipFile(whole) as archive,
            archive.open(f"{self._name}.npy") as file,
        ):
            yield file

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows, `num_rows` at a time."""
        if not self._is_fortran:
            yield from super().chunks(num_rows)
            return
        # Rows are not contiguous: arrays of this rare layout are loaded as a whole.
        with self._open() as file:
            file.read(self._header_bytes)
            array = np.frombuffer(file.read(), self.dtype).reshape(self.shape, order="F")
        yield from InMemoryRows(array).chunks(num_rows)


class RecordRows:
    """Rows of several arrays, one for each input of the model, as rows of one structured array."""

    def __init__(self, inputs: Mapping[str, Rows]) -> None:
        """Raise ValueError if the arrays differ in length."""
        if len({rows.shape[:1] for rows in inputs.values()}) != 1:
            raise ValueError("arrays of different lengths")
        self._inputs = dict(inputs)
        self.shape: tuple[int, ...] = next(iter(inputs.values())).shape[:1]
        self.dtype: np.dtype[Any] = np.dtype(
            [(name, rows.dtype.newbyteorder("="), rows.shape[1:]) for name, rows in self._inputs.items()]
        )

    def chunks(self, num_rows: int) -> Iterator[Array]:
        """Yield all rows, `num_rows` at a time; raises what the arrays raise."""
        for chunks in zip(*(rows.chunks(num_rows) for rows in self._inputs.values()), strict=True):
            records = np.empty(len(chunks[0]), self.dtype)
            for name, chunk in zip(self._inputs, chunks, strict=True):
                records[name] = chunk
            yield records


def as_rows(parts: Mapping[str, Rows]) -> Rows:
    """Return rows of a structured array with the fields `parts`; of '', the only one, as they are."""
    return parts[""] if list(parts) == [""] else RecordRows(parts)


PAIR_NAMES = (("x", "y"), ("images", "labels"))
LABEL_NAMES = ("y", "labels")


class ArraySource:
    """Rows of samples and rows of labels."""

    files_of_class: tuple[int, ...] = ()

    def __init__(self, samples: Rows, labels: Rows, spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, unless they are samples and their labels."""
        check_arrays(samples, labels, spec.source)
        self.class_names = spec.classes
        self.num_samples = samples.shape[0]
        self.sample_bytes = samples.dtype.itemsize * math.prod(samples.shape[1:])
        self._samples = samples
        self._labels = labels
        self._source = spec.source
        self.padded: dict[str, tuple[int, ...]] = {}

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all rows from index `start` on."""
        num_rows = max(1, limits.block_bytes // max(1, self.sample_bytes))
        position = 0
        with convert_read_errors(self._source):
            chunks = zip(self._samples.chunks(num_rows), self._labels.chunks(num_rows), strict=True)
            for samples, labels in chunks:
                num_skipped = min(len(samples), max(0, start - position))
                position += len(samples)
                if num_skipped < len(samples):
                    part = slice(num_skipped, None)
                    yield Block(len(samples[part]), as_samples(samples[part]), as_labels(labels[part]))


def check_arrays(samples: Rows, labels: Rows, source: str) -> None:
    """Raise WorkerError, exit code 2, unless they are samples and their labels."""
    if not samples.shape or not labels.shape:
        raise WorkerError(f"data at {source} is a single number, not an array of samples", exit_code=2)
    if 0 in samples.shape:  # labels without values are those of a loss inside the model
        raise empty_data_error(source)
    if samples.shape[0] != labels.shape[0]:
        raise WorkerError(
            f"data at {source} has {samples.shape[0]} samples but {labels.shape[0]} labels", exit_code=2
        )
    if not all(array.dtype.kind == "b" or is_numeric(array.dtype) for array in (samples, labels)):
        raise WorkerError(
            f"data at {source} is not numeric: {samples.dtype} and {labels.dtype}",
            remedy="turn text into numbers, in a function of your own: data.public.function",
            exit_code=2,
        )


def empty_data_error(source: str) -> WorkerError:
    """Return the error for data without any samples."""
    return WorkerError(
        f"data at {source} is empty", remedy="add samples or remove it from job.yaml", exit_code=2
    )


@contextlib.contextmanager
def convert_read_errors(source: str) -> Iterator[None]:
    """Convert the errors of damaged files to a WorkerError, exit code 2, that names no file."""
    try:
        yield
    except DAMAGED_ARCHIVE as error:
        raise WorkerError(
            f"data at {source} cannot be read: {type(error).__name__}",
            remedy="replace the damaged file",
            exit_code=2,
        ) from None


def open_npy_pair(root: Path, spec: PrepareSpec) -> tuple[Array, Array]:
    """Map and check images.npy and labels.npy in `root`."""
    if not ((root / "images.npy").exists() and (root / "labels.npy").exists()):
        raise WorkerError(
            f"data at {spec.source} lacks one of images.npy and labels.npy",
            remedy="add the missing file",
            exit_code=2,
        )
    with convert_read_errors(spec.source):
        samples, labels = map_array(root / "images.npy"), map_array(root / "labels.npy")
    check_arrays(InMemoryRows(samples), InMemoryRows(labels), spec.source)
    return samples, labels


def open_npy_files(root: Path, spec: PrepareSpec) -> ArraySource:
    """Return images.npy and labels.npy in `root` as a source, for arrays that cannot be used in place."""
    samples, labels = open_npy_pair(root, spec)
    return ArraySource(InMemoryRows(samples), InMemoryRows(labels), spec)


MAX_NAMED = 10
"""Arrays of an .npz that a message lists."""


def open_npz(path: Path, spec: PrepareSpec) -> ArraySource:
    """Return arrays x and y, or images and labels, of an .npz file; or y and an array for each input.

    An array `sample_weight` has the weights. Instead of y, there may be an array for each of several outputs.
    """
    with convert_read_errors(spec.source):
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        inputs, outputs = _choose_arrays(names, spec)
        if inputs and outputs:
            labels: dict[str, Rows] = {name: NpzMember(path, member) for name, member in outputs.items()}
            if SAMPLE_WEIGHT in names:
                labels = {name or LABEL: rows for name, rows in labels.items()}
                labels[SAMPLE_WEIGHT] = _as_weights(NpzMember(path, SAMPLE_WEIGHT), spec)
            samples = {name: NpzMember(path, member) for name, member in inputs.items()}
            return ArraySource(as_rows(samples), as_rows(labels), spec)
    found = "" if spec.is_private else f"; it has {', '.join(names[:MAX_NAMED]) or 'none'}"
    raise WorkerError(
        f"the .npz at {spec.source} has no arrays x and y (or images and labels){found}",
        remedy="name a function that returns them, FILE.py:NAME; "
        "for a model with several inputs: y, and an array for each input under its name",
        exit_code=2,
    )


def _choose_arrays(names: list[str], spec: PrepareSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return the arrays of inputs and of outputs by name, '' for the only one; none if they are not there."""
    for samples, labels in PAIR_NAMES:
        if samples in names and labels in names:
            return {"": samples}, {"": labels}
    found = [name for name in LABEL_NAMES if name in names]
    outputs = {"": found[0]} if len(found) == 1 else {}
    if not found and spec.outputs and set(spec.outputs) <= set(names):
        outputs = {name: name for name in spec.outputs}
    others = {SAMPLE_WEIGHT, *outputs.values()}
    return {name: name for name in sorted(names) if name not in others}, outputs


def _as_weights(rows: NpzMember, spec: PrepareSpec) -> Rows:
    if len(rows.shape) != 1:
        raise WorkerError(
            f"the array {SAMPLE_WEIGHT} of the .npz at {spec.source} has shape {rows.shape}",
            remedy="give it one number for each sample",
            exit_code=2,
        )
    return rows


def open_idx_pair(images: Path, labels: Path, spec: PrepareSpec) -> ArraySource:
    """Return an IDX file of images and one of labels as a source."""
    with convert_read_errors(spec.source):
        return ArraySource(IdxFile(images), IdxFile(labels), spec)
