"""Arrays of samples and labels: their types, the memory maps of their files, and random ones."""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from csdctl.worker.data.file_hash import chunk_bytes, hash_file, open_regular
from csdctl.worker.process.errors import JobError, WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.durable_files import replacing

Array = np.ndarray[Any, Any]

MAX_COMPARED = 4
"""Chunks that a step compares at most, since it waits. Others are compared when they are read again."""
OBJECTS = "it has Python objects, not numbers"
MAX_HEADER_BYTES = 60_000
"""Room for about a thousand fields; a header of the first version can have 65,535."""
PREPARE = "run `csdctl prepare`"
RESTORE = f"{PREPARE}; if nobody has changed that file, check its disk, and restore your own data from a copy"


def as_labels(labels: Array) -> Array:
    """Return labels in the type that every rank uses, field by field: int32 for integers, else float32."""
    return labels.astype(label_dtype(labels.dtype), copy=False)


def label_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which labels of `dtype` are used."""
    return _by_field(dtype, lambda base: np.dtype(np.int32 if base.kind in "iu" else np.float32))


def as_samples(samples: Array) -> Array:
    """Return samples in the type in which they are stored, field by field, as Keras' fit converts them.

    Integers stay, in this machine's byte order. float64, bfloat16 and truth values become float32.
    """

    def stored(base: np.dtype[Any]) -> np.dtype[Any]:
        is_kept = base.kind in "iu" or (base.kind == "f" and base.itemsize <= 4)
        return base.newbyteorder("=") if is_kept else np.dtype(np.float32)

    return samples.astype(_by_field(samples.dtype, stored), copy=False)


def _by_field(dtype: np.dtype[Any], convert: Callable[[np.dtype[Any]], np.dtype[Any]]) -> np.dtype[Any]:
    if dtype.names is None:
        return convert(dtype)
    return np.dtype([(name, convert(dtype[name].base), dtype[name].shape) for name in dtype.names])


def fields_of(array: Array) -> dict[str, Array]:
    """Return the arrays of a structured array by name. {'': array} for a plain one."""
    if array.dtype.names is None:
        return {"": array}
    return {name: array[name] for name in array.dtype.names}


def map_fields(function: Callable[[Array], Any], array: Array) -> Any:
    """Return what `function` returns of a plain array, or a dict of what it returns of each field."""
    if array.dtype.names is None:
        return function(array)
    return {name: function(array[name]) for name in array.dtype.names}


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` consists of integers and floats only."""
    fields = [dtype] if dtype.names is None else [dtype[name].base for name in dtype.names]
    return all(field.kind in "uif" for field in fields)


class CheckedArray:
    """The array of a .npy file that has not changed since it was prepared."""

    def __init__(self, path: str, sha256: str) -> None:
        """Raise WorkerError unless the file has the hash `sha256` and an array of numbers."""
        self._path, self._sha256 = path, sha256
        try:
            self._file = open_regular(path)
            self.check()
            self.array = map_file(self._file)
            if not is_numeric(self.array.dtype):
                raise ValueError(f"its type is {self.array.dtype}, expected numbers")
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
            remedy = f"{PREPARE}; public data `on: every-node` must be at the same path on this node"
            # It names no file, for a name can be private.
            raise WorkerError(f"the data set cannot be read: {why}", remedy=remedy) from None
        self._unread = set(range(len(self._checksums)))  # chunks not yet compared with their checksums

    def __getitem__(self, rows: Array) -> Array:
        """Return the rows with these numbers, shape (n,). Raises JobError if the disk has damaged them."""
        if self._unread:
            self._compare(rows)
        selected: Array = self.array[rows]
        return selected

    def check(self, *, is_fresh: bool = False) -> None:
        """Raise JobError if the file is not the one that was prepared. Fast if nobody touched it.

        `is_fresh`: it is read again in any case.
        """
        sha256, self._checksums = hash_file(self._file, self._path, is_fresh=is_fresh)
        if sha256 != self._sha256:
            hashes = f"expected SHA-256 {self._sha256 or 'of nothing'}, found {sha256}"
            raise JobError(f"{self._path} is not what was prepared: {hashes}", remedy=RESTORE)

    def _compare(self, rows: Array) -> None:
        """Compare the chunks that have `rows` with their checksums, each once."""
        size, row_bytes = chunk_bytes(os.fstat(self._file.fileno()).st_size), self.array[:1].nbytes
        starts = (getattr(self.array, "offset", 0) + rows * row_bytes).tolist()  # none: it has no bytes
        touched = {n for start in starts for n in range(start // size, -(-(start + row_bytes) // size))}
        is_by_row = self.array.flags.c_contiguous
        for number in sorted(self._unread & touched)[:MAX_COMPARED] if is_by_row else [*self._unread]:
            if zlib.crc32(os.pread(self._file.fileno(), size, number * size)) != self._checksums[number]:
                self.check(is_fresh=True)
            self._unread.discard(number)


def map_file(file: IO[bytes]) -> Array:
    """Map an open .npy file without unpickling. Raises OSError, or ValueError if it is not one array."""
    file.seek(0)
    shape, is_fortran, dtype = read_array_header(file)
    if not shape:
        raise ValueError(f"expected an array of samples, found a single {dtype}")
    num_bytes = os.fstat(file.fileno()).st_size - file.tell()
    if math.prod(shape) * dtype.itemsize != num_bytes:
        raise ValueError(f"{num_bytes} bytes are not {dtype} of shape {shape}")
    order: Any = "F" if is_fortran else "C"
    if not num_bytes:  # an empty part of a file cannot be mapped
        return np.empty(shape, dtype, order)
    return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape, order=order)


def read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, Fortran's order and type of the .npy array that begins here, or OSError, ValueError."""
    try:
        formats = np.lib.format
        read = {(1, 0): formats.read_array_header_1_0, (2, 0): formats.read_array_header_2_0}
        shape, is_fortran, dtype = read[formats.read_magic(file)](file, max_header_size=MAX_HEADER_BYTES)
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python, and passes on all of its errors
        raise ValueError(f"its header cannot be read: {type(error).__name__}") from None
    if dtype.hasobject:
        raise ValueError(OBJECTS)
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"expected an array of samples, found {dtype} of shape {shape}")
    return shape, is_fortran, dtype


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an uncompressed .npz, so that it survives a power cut. Raises OSError."""
    with replacing(path) as file:
        np.savez(file, **arrays)


def hash_arrays(arrays: Iterable[Array]) -> str:
    """Return the SHA-256, in hex, of the bytes of arrays, such as all weights of a model."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def map_array(path: str | Path) -> Array:
    """Map one .npy file. Raises what `map_file` raises."""
    with open_regular(path) as file:
        return map_file(file)


def dtype_to_text(dtype: np.dtype[Any]) -> str:
    """Return a dtype as text, such as 'uint8'. A structured one as JSON: [[name, type, shape], …]."""
    if dtype.names is None:
        return str(dtype)
    fields = [(name, dtype[name]) for name in dtype.names]
    return json.dumps([[name, str(field.base), list(field.shape)] for name, field in fields])


def dtype_from_text(text: str) -> np.dtype[Any]:
    """Parse what `dtype_to_text` returned. Raises ValueError for other text."""
    try:
        if not text.startswith("["):
            return np.dtype(text)
        return np.dtype([(name, base, tuple(shape)) for name, base, shape in json.loads(text)])
    except Exception as error:  # numpy evaluates some texts as Python, and passes on all of its errors
        raise ValueError(f"{text[:80]!r} is not a type of samples: {type(error).__name__}") from None


def random_batch(
    generator: np.random.Generator, element_spec: DatasetInfo, count: int, num_indices: int | None = None
) -> tuple[Array, Array]:
    """Return random samples (n, …) and labels (n, …) shaped like a data set's: a step takes as long.

    Floats are in [0, 1). Integers are in [0, 128), or up to the largest of the data set: they may be indices.
    `num_indices`: of the model's smallest embedding. The columns of one input may be indices of several.
    """
    info, dtype = element_spec, dtype_from_text(element_spec.dtype)
    largest = dict(info.max_values)
    if num_indices is not None:
        for name in dtype.names or [""]:
            largest[name] = min(num_indices - 1, largest.get(name, num_indices - 1))
    samples = np.empty((count, *info.sample_shape), dtype)
    label_type = info.label_dtype or ("int32" if info.max_label >= 0 else "float32")
    labels = np.empty((count, *info.label_shape), dtype_from_text(label_type))
    for array, most in ((samples, largest), (labels, {"": info.max_label, **info.max_labels})):
        for name, field in fields_of(array).items():
            if field.dtype.kind in "iu":
                highest = min(max(0, most.get(name, 127)), (1 << 31) - 1)
                field[...] = generator.integers(0, highest, field.shape, endpoint=True)
            else:
                field[...] = generator.random(field.shape)
    return samples, labels
