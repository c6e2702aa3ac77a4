"""Existing arrays: .npy pairs, .npz archives, pairs of IDX files. Their values stay unchanged.

Files are read in chunks, compressed ones too: memory use does not grow with the data.
"""

import contextlib
import gzip
import io
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from csdctl.worker.data.arrays import Array, as_labels, as_samples, is_numeric, map_array, read_array_header
from csdctl.worker.ingest.sources.source import Block, IngestLimits, SampleSource, skip_rows
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import DAMAGED_ARCHIVE, BoundedFile
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec

_PIECE_BYTES = 64 << 20
"""More than a block of rows has, unless a single row is larger."""


@dataclass(frozen=True)
class Rows:
    """An array on disk or in memory, read from its first row to its last."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: Callable[[int], Iterator[Array]]
    """Yields all rows, so many at a time; raises OSError, ValueError, EOFError for damaged files."""


def rows_of(array: Array) -> Rows:
    """Return the rows of an array in memory, or of a memory map."""

    def chunks(num_rows: int) -> Iterator[Array]:
        return (array[start : start + num_rows] for start in range(0, len(array), num_rows))

    return Rows(array.shape, array.dtype, chunks)


def _stream(
    opened: contextlib.AbstractContextManager[IO[bytes]],
    header_bytes: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    num_rows: int,
) -> Iterator[Array]:
    """Yield rows stored one after another in a file, after a header.

    Raises EOFError for too few, ValueError for extra data.
    """
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    with opened as file:
        file.read(header_bytes)
        for start in range(0, shape[0], num_rows):
            count = min(num_rows, shape[0] - start)
            content = _read(file, count * row_bytes)
            if len(content) != count * row_bytes:
                raise EOFError("the array is truncated")
            yield np.frombuffer(content, dtype).reshape(count, *shape[1:])
        if file.read(1):  # reading to the end also makes an archive check its CRC
            raise ValueError("the array is longer than its header says")


def _read(file: IO[bytes], num_bytes: int) -> bytes:
    """Return up to `num_bytes`; reserves no memory for more than the file has, whatever its header says."""
    pieces = []
    while num_bytes and (piece := file.read(min(num_bytes, _PIECE_BYTES))):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def read_idx(path: Path) -> Rows:
    """Return the rows of an IDX file of bytes: magic 00 00 08 <dimensions>, big-endian sizes, data.

    Raises ValueError for another format, OSError or EOFError if the file cannot be read.
    """

    def opened() -> Any:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")

    with opened() as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08":
            raise ValueError("not an IDX file of bytes")
        sizes = file.read(4 * magic[3])
    form = 4 + len(sizes), tuple(np.frombuffer(sizes, ">u4", magic[3]).tolist()), np.dtype(np.uint8)
    return Rows(*form[1:], lambda num_rows: _stream(opened(), *form, num_rows))


def read_member(path: Path, name: str) -> Rows:
    """Return the rows of one array of an .npz file, without ever unpickling.

    Raises ValueError, OSError or an error of zipfile if it cannot be read.
    """

    @contextlib.contextmanager
    def opened() -> Iterator[IO[bytes]]:
        with (
            BoundedFile(io.FileIO(path)) as whole,
            zipfile.ZipFile(whole) as archive,
            archive.open(f"{name}.npy") as file,
        ):
            yield file

    with opened() as file:
        shape, is_fortran, dtype = read_array_header(file)
        header_bytes = file.tell()
        if is_fortran:  # rows are not contiguous: arrays of this rare layout are loaded as a whole
            return rows_of(np.frombuffer(file.read(), dtype).reshape(shape, order="F"))
    return Rows(shape, dtype, lambda num_rows: _stream(opened(), header_bytes, shape, dtype, num_rows))


def join_rows(parts: Mapping[str, Rows]) -> Rows:
    """Return rows of a structured array with the fields `parts`; of '', the only one, as they are.

    Raises ValueError if the arrays differ in length.
    """
    if list(parts) == [""]:
        return parts[""]
    if len({rows.shape[:1] for rows in parts.values()}) != 1:
        raise ValueError("arrays of different lengths")
    dtype = np.dtype([(name, rows.dtype.newbyteorder("="), rows.shape[1:]) for name, rows in parts.items()])

    def chunks(num_rows: int) -> Iterator[Array]:
        for fields in zip(*(rows.chunks(num_rows) for rows in parts.values()), strict=True):
            records = np.empty(len(fields[0]), dtype)
            for name, field in zip(parts, fields, strict=True):
                records[name] = field
            yield records

    return Rows(next(iter(parts.values())).shape[:1], dtype, chunks)


PAIR_NAMES = (("x", "y"), ("images", "labels"))
LABEL_NAMES = ("y", "labels")


class ArraySource(SampleSource):
    """Rows of samples and rows of labels."""

    def __init__(self, samples: Rows, labels: Rows, spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, unless they are samples and their labels."""
        super().__init__(spec)
        check_arrays(samples, labels, spec.source)
        self.num_samples = samples.shape[0]
        self.sample_bytes = samples.dtype.itemsize * math.prod(samples.shape[1:])
        self.samples, self.labels = samples, labels
        self._source = spec.source

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all rows from index `start` on."""
        num_rows = max(1, limits.block_bytes // max(1, self.sample_bytes))
        with convert_read_errors(self._source):
            chunks = zip(self.samples.chunks(num_rows), self.labels.chunks(num_rows), strict=True)
            for block in skip_rows(chunks, start):
                yield Block(block.num_read, as_samples(block.samples), as_labels(block.labels))


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


def open_npy_files(root: Path, spec: PrepareSpec) -> ArraySource:
    """Map images.npy and labels.npy in `root`."""
    if not ((root / "images.npy").exists() and (root / "labels.npy").exists()):
        raise WorkerError(
            f"data at {spec.source} lacks one of images.npy and labels.npy",
            remedy="add the missing file",
            exit_code=2,
        )
    with convert_read_errors(spec.source):
        samples, labels = map_array(root / "images.npy"), map_array(root / "labels.npy")
    return ArraySource(rows_of(samples), rows_of(labels), spec)


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
            labels = {name: read_member(path, member) for name, member in outputs.items()}
            if SAMPLE_WEIGHT in names:
                labels = {name or LABEL: rows for name, rows in labels.items()}
                labels[SAMPLE_WEIGHT] = _as_weights(read_member(path, SAMPLE_WEIGHT), spec)
            samples = {name: read_member(path, member) for name, member in inputs.items()}
            return ArraySource(join_rows(samples), join_rows(labels), spec)
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


def _as_weights(rows: Rows, spec: PrepareSpec) -> Rows:
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
        return ArraySource(read_idx(images), read_idx(labels), spec)
