"""Existing arrays: .npy pairs, .npz archives, and tables: .csv files with a header.

The values of arrays stay unchanged. Tables are of numbers only, and no error contains a value.

Files are mapped, after decompression into a temporary file: memory use does not grow with the data.
"""

import contextlib
import csv
import errno
import io
import itertools
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from csdctl.worker.data.arrays import OBJECTS, Array, is_numeric, map_array, read_array_header
from csdctl.worker.ingest.sources.source import (
    BLOCK_BYTES,
    Block,
    DataFile,
    SampleSource,
    Tree,
    UnusableError,
    block_at,
    convert_write_errors,
    data_error,
    to_records,
)
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import DAMAGED_ARCHIVE, BoundedFile
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec, TableSchema, list_names

_EXPLAINED = {OBJECTS: "save it with a type of numbers: array.astype(np.float32)"}
"""Texts of errors of files that are not damaged, and remedies."""
_MEND_TABLE = (
    "leave columns out (data.csv.drop), write decimal points, quote commas, or turn the rest into numbers in "
    "your own function; data.allow_nan: true keeps nan"
)
_DAMAGED: tuple[type[Exception], ...] = (*DAMAGED_ARCHIVE, csv.Error)
LABEL_NAMES = ("y", "labels")
MORE_CELLS = "\0"


def _unpack(
    file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any], store: str, *, is_fortran: bool = False
) -> Array:
    """Map an array whose bytes are the rest of `file`, copied to a nameless file on the disk of `store`.

    Raises EOFError for too few bytes, ValueError for more, WorkerError if the disk is too small.
    """
    left = num_bytes = dtype.itemsize * math.prod(shape)
    with tempfile.TemporaryFile(dir=store) as copy:
        with convert_write_errors():
            # Not reserved: the header may be wrong, and other programs would find the disk full meanwhile.
            if num_bytes > shutil.disk_usage(store).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while left and (piece := file.read(min(left, 1 << 20))):
            with convert_write_errors():
                copy.write(piece)
            left -= len(piece)
        if left:
            raise EOFError("the array is truncated")
        if file.read(1):  # reading to the end also makes an archive check its CRC
            raise ValueError("the array is longer than its header says")
        with convert_write_errors():
            copy.flush()
        order: Any = "F" if is_fortran else "C"
        if not num_bytes:  # an empty file cannot be mapped
            return np.empty(shape, dtype, order)
        return np.memmap(copy, dtype, "r", shape=shape, order=order)


def read_member(archive: zipfile.ZipFile, name: str, store: str) -> Array:
    """Map an array of an .npz file without unpickling. Raises ValueError, OSError or an error of zipfile."""
    with archive.open(f"{name}.npy") as file:
        shape, is_fortran, dtype = read_array_header(file)
        return _unpack(file, shape, dtype, store, is_fortran=is_fortran)


class ArraySource(SampleSource):
    """Arrays of inputs and of outputs by name, '' for the only one."""

    def __init__(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, unless they are samples and their labels."""
        super().__init__(spec)
        arrays = [*inputs.values(), *outputs.values()]
        if not all(array.shape for array in arrays):
            raise data_error(spec.source, "is a single number, not an array of samples")
        if any(0 in array.shape for array in inputs.values()):  # labels may have no values: of add_loss()
            raise empty_data_error(spec.source)
        counts = [sorted({len(array) for array in part.values()}) for part in (inputs, outputs)]
        if len(counts[0]) > 1 or counts[0] != counts[1]:
            samples, labels = (" or ".join(map(str, found)) for found in counts)
            raise data_error(spec.source, f"has {samples} samples but {labels} labels")
        if not all(array.dtype.kind == "b" or is_numeric(array.dtype) for array in arrays):
            types = " and ".join(dict.fromkeys(str(array.dtype) for array in arrays))
            remedy = "turn them into numbers, in a function of your own: data.public.function"
            raise data_error(spec.source, f"is not numeric: {types}", remedy)
        self.inputs, self.outputs = inputs, outputs
        self.num_samples = len(next(iter(inputs.values())))
        self.sample_bytes = sum(array.nbytes for array in inputs.values()) // self.num_samples

    def rows(self, start: int, stop: int) -> Block:
        """Return some of the samples."""
        samples, labels = (
            to_records({name: array[start:stop] for name, array in part.items()}, 1)
            for part in (self.inputs, self.outputs)
        )
        return block_at(start, samples, labels)

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield all rows from index `start` on."""
        num_rows = max(1, BLOCK_BYTES // max(1, self.sample_bytes))
        return (self.rows(row, row + num_rows) for row in range(start, self.num_samples, num_rows))


def empty_data_error(source: str) -> WorkerError:
    """Return the error for data without any samples."""
    return data_error(source, "is empty", "add samples or remove it from job.yaml")


@contextlib.contextmanager
def convert_read_errors(source: str, *, is_text: bool = False) -> Iterator[None]:
    """Convert the errors of damaged files to a WorkerError, exit code 2, that names no file."""
    try:
        yield
    except _DAMAGED as error:
        if is_text and isinstance(error, UnicodeDecodeError):
            raise data_error(source, "is not text in UTF-8", "save it as CSV in UTF-8") from None
        reason = type(error).__name__ if str(error) not in _EXPLAINED else str(error)
        remedy = _EXPLAINED.get(str(error), "replace the damaged file")
        raise data_error(source, f"cannot be read: {reason}", remedy) from None


def open_npy_files(root: Path, spec: PrepareSpec) -> ArraySource:
    """Map images.npy and labels.npy in `root`."""
    if not ((root / "images.npy").exists() and (root / "labels.npy").exists()):
        raise data_error(spec.source, "lacks one of images.npy and labels.npy", "add the missing file")
    with convert_read_errors(spec.source):
        samples, labels = map_array(root / "images.npy"), map_array(root / "labels.npy")
    return ArraySource({"": samples}, {"": labels}, spec)


def open_npz(path: Path, spec: PrepareSpec) -> ArraySource:
    """Return x and y, images and labels, or y and arrays by input, of an .npz. With `sample_weight`."""
    with (
        convert_read_errors(spec.source),
        BoundedFile(io.FileIO(path)) as whole,
        zipfile.ZipFile(whole) as archive,
    ):
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        chosen = _choose_arrays(names, spec)
        unread = set(names) - {SAMPLE_WEIGHT}.union(*(part.values() for part in chosen))
        if all(chosen) and any("weight" in name.lower() for name in unread):
            problem = f"has weights in an array whose name is not {SAMPLE_WEIGHT}"
            raise data_error(spec.source, problem, f"rename the array to {SAMPLE_WEIGHT}, or remove it")
        if all(chosen):
            inputs, outputs = (
                {name: read_member(archive, member, spec.store) for name, member in part.items()}
                for part in chosen
            )
            if SAMPLE_WEIGHT in names:
                outputs = {name or LABEL: array for name, array in outputs.items()}
                outputs[SAMPLE_WEIGHT] = read_member(archive, SAMPLE_WEIGHT, spec.store)
            return ArraySource(inputs, outputs, spec)
    found = "" if spec.is_private else f"; it has {list_names(names, 10) or 'none'}"
    several = "for a model with several inputs: y, and an array for each input under its name"
    remedy = f"name a function that returns them, FILE.py:NAME; {several}"
    raise data_error(spec.source, f"has no arrays x and y (or images and labels){found}", remedy)


def _choose_arrays(names: list[str], spec: PrepareSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return the arrays of inputs and of outputs by name, '' for the only one. None if they are not there."""
    has_inputs = len(spec.inputs) > 1 and set(spec.inputs) <= set(names)
    has_outputs = bool(spec.outputs) and set(spec.outputs) <= set(names)
    for samples, labels in (("x", "y"), ("images", "labels")):
        if samples in names and labels in names and not has_inputs and not has_outputs:
            return {"": samples}, {"": labels}
    found = [name for name in LABEL_NAMES if name in names]
    outputs = {"": found[0]} if len(found) == 1 else {}
    if has_outputs:
        outputs = {name: name for name in spec.outputs}
    inputs = list(spec.inputs) if has_inputs else sorted({*names} - {SAMPLE_WEIGHT, *outputs.values()})
    return {"" if "" in spec.inputs and len(inputs) == 1 else name: name for name in inputs}, outputs


def is_table(file: DataFile, tree: Tree) -> bool:
    """Return whether a file has the name of a .csv file."""
    return tree.path_of(file).suffix.lower() == ".csv"


def read_columns(path: Path, source: str) -> list[str]:
    """Return the names of the columns of a .csv file. Raises WorkerError, exit code 2."""
    with convert_read_errors(source, is_text=True), path.open(newline="", encoding="utf-8-sig") as file:
        columns = [name.strip() for name in next(csv.reader(file), [])]
    if columns and all(name and not name.strip("+-.0123456789eE") for name in columns):
        problem = "has a first line of numbers, where the names of the columns are expected"
        raise data_error(source, problem, "add a line with a name for each column")
    return columns


def open_table(tree: Tree, spec: PrepareSpec) -> ArraySource:
    """Return the rows of .csv files as vectors, or as inputs by column. Raises WorkerError, exit code 2."""
    if spec.table is None:
        problem = "consists of .csv files, but the job does not describe them"
        raise data_error(spec.source, problem, "set data.csv in job.yaml: {label: COLUMN}")
    schema, is_by_name = spec.table, bool(spec.inputs) and list(spec.inputs) != [""]
    expected = list(spec.inputs if is_by_name else spec.columns)
    paths = [tree.path_of(file) for file in tree.files if is_table(file, tree)]
    columns = _read_header(paths, spec)
    features = _choose_features(columns, schema, spec, expected)
    others = set(columns) - {*expected, *schema.label, schema.weight, *schema.drop}
    if others and expected and not is_by_name:
        named = "" if spec.is_private else f": {list_names(sorted(others))}"
        problem = f"has columns that the public data does not have{named}"
        raise data_error(spec.source, problem, "remove them from its file")
    used = [*features, *schema.label, *filter(None, [schema.weight])]
    numbers = _read_numbers(paths, columns, used, spec)
    column = dict(zip(used, numbers.T, strict=True))
    inputs = {"": numbers[:, : len(features)]}
    if is_by_name:
        inputs = {name: _as_input(column[name]).reshape(-1, *spec.inputs[name]) for name in features}
    outputs = {name: _as_label(column[name], spec) for name in schema.label}
    if len(outputs) == 1 or not spec.outputs:
        parts = list(outputs.values())
        outputs = {"": parts[0] if len(parts) == 1 else np.stack(parts, axis=1)}
    if schema.weight:
        outputs = {name or LABEL: array for name, array in outputs.items()}
        outputs[SAMPLE_WEIGHT] = column[schema.weight]
    source = ArraySource(inputs, outputs, spec)
    source.columns = () if spec.is_private else tuple(features)
    return source


def _as_label(values: Array, spec: PrepareSpec) -> Array:
    """Return a column of labels as int32 if it has integers only, and may have classes."""
    is_integer = (values == np.rint(values)).all() and np.abs(values).max(initial=0) < 1 << 31
    return values.astype(np.int32 if is_integer and not spec.is_regression else np.float32)


def _as_input(values: Array) -> Array:
    """Return a column as int64 if it has integers that float32 does not hold: they may be indices."""
    is_integer = (np.abs(values) < 1 << 53).all() and (values == np.rint(values)).all()
    return values.astype(np.int64) if is_integer and (values != values.astype(np.float32)).any() else values


def _read_header(paths: Sequence[Path], spec: PrepareSpec) -> list[str]:
    columns, *others = [read_columns(path, spec.source) for path in paths] or [[]]
    if not columns:
        raise empty_data_error(spec.source)
    for path, header in zip(paths, (columns, *others), strict=True):
        if header != columns or len(set(header)) != len(header):
            named = "" if spec.is_private or len(paths) == 1 else f": {paths[0].name} and {path.name}"
            problem = f"has .csv files with different columns, or a column twice{named}"
            raise data_error(spec.source, problem, "give all the same header")
    return columns


def _choose_features(
    columns: Sequence[str], schema: TableSchema, spec: PrepareSpec, by_name: list[str]
) -> list[str]:
    """Return the columns with the model's inputs. Raises WorkerError if columns are missing."""
    others = [*schema.label, *filter(None, [schema.weight]), *schema.drop]
    features = [name for name in columns if name not in others]
    if missing := [name for name in others if name not in columns]:
        known = "" if spec.is_private else f", but {list_names(columns)}"
        problem = f"has no column {list_names(missing)}{known}"
        raise data_error(spec.source, problem, "fix data.csv in job.yaml")
    if missing := [name for name in by_name if name not in features]:
        problem = f"has no column {list_names(missing)} for the model's inputs"
        remedy = "name inputs after columns, or let the model have one input for all"
        raise data_error(spec.source, problem, remedy)
    if not features:
        raise data_error(spec.source, "has no columns but labels", "fix data.csv in job.yaml")
    if "" in features and not by_name:
        remedy = 'leave it out: data.csv.drop: [""], or write the file without an index'
        raise data_error(spec.source, "has a column without a name", remedy)
    return by_name or features


def _read_numbers(paths: Sequence[Path], columns: list[str], names: list[str], spec: PrepareSpec) -> Array:
    """Map the numbers of some columns, float64, shape (n, columns), in a nameless file on the store."""
    with tempfile.TemporaryFile(dir=spec.store) as copy:
        found = _rows(paths, columns, names, spec)
        with convert_write_errors():
            while rows := list(itertools.islice(found, 256)):
                copy.write(np.array(rows, np.float64).data)
            copy.flush()
        if not copy.tell():
            raise empty_data_error(spec.source)
        return np.memmap(copy, np.float64, "r").reshape(-1, len(names))


def _rows(
    paths: Sequence[Path], columns: list[str], names: list[str], spec: PrepareSpec
) -> Iterator[list[float]]:
    source, is_named = spec.source, len(paths) > 1 and not spec.is_private
    for path in paths:
        with convert_read_errors(source, is_text=True), path.open(newline="", encoding="utf-8-sig") as file:
            next(csv.reader(file), None)
            rows = csv.DictReader(file, columns, restkey=MORE_CELLS, restval="")
            for row in rows:
                try:
                    if MORE_CELLS in row:
                        raise UnusableError("a row with more cells than the header")
                    yield [_number(row[name].strip(), name, spec) for name in names]
                except UnusableError as error:
                    where = f"line {rows.line_num + 1}" + (f" of {path.name}" if is_named else "")
                    raise data_error(source, f"has {error}, {where}", _MEND_TABLE) from None


def _number(text: str, name: str, spec: PrepareSpec) -> float:
    with contextlib.suppress(ValueError):
        value = float(text.replace("_", "text"))  # Python's numbers may have underscores, such as 2024_01
        if math.isfinite(value) or spec.allows_nan:
            return value
    found = "empty cells" if not text else "text, or numbers that are not finite"
    raise UnusableError(f"{found} in column {name}")
