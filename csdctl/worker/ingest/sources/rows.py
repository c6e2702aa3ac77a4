"""Rows of arrays in memory, in IDX files and in .npz archives.

They are read in chunks, from compressed files too: memory use does not grow with the data.
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

from csdctl.worker.data.arrays import Array, read_array_header
from csdctl.worker.process.files import BoundedFile

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
