"""Arrays and tables of numbers: .npy pairs, .npz archives, and .csv files with a header.

Files are mapped, after conversion into a temporary file: memory use does not grow with the data.
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

import numpy as np

from csdctl.worker.data.arrays import Array, is_numeric, map_array, map_file
from csdctl.worker.ingest.sources import source as sources
from csdctl.worker.ingest.sources.source import BLOCK_BYTES, Tree, UnusableError, data_error
from csdctl.worker.process.files import BoundedFile
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec, TableSchema, list_names

COPIED_BYTES = 1 << 20
"""Bytes that are decompressed at once."""
LABEL_NAMES = ("y", "labels")
MEND_TABLE = (
    "leave columns out (data.csv.drop), write decimal points, quote commas, or turn text into numbers in "
    "your own function; data.allow_nan: true keeps nan"
)
ROWS_AT_ONCE = 256


class ArraySource(sources.SampleSource):
    """Arrays of inputs and of outputs by name, '' for the only one."""

    def __init__(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, unless they are samples and their labels."""
        super().__init__(spec)
        arrays = [*inputs.values(), *outputs.values()]
        if not all(array.shape for array in arrays):
            raise data_error(spec.source, "is a single number, not an array of samples")
        if any(0 in array.shape for array in inputs.values()):  # labels may have no values: of add_loss()
            raise sources.empty_data_error(spec.source)
        counts = [sorted({len(array) for array in part.values()}) for part in (inputs, outputs)]
        if len(counts[0]) > 1 or counts[0] != counts[1]:
            samples, labels = (" or ".join(map(str, sizes)) for sizes in counts)
            raise data_error(spec.source, f"has {samples} samples but {labels} labels")
        if not all(array.dtype.kind == "b" or is_numeric(array.dtype) for array in arrays):
            types = " and ".join(dict.fromkeys(str(array.dtype) for array in arrays))
            remedy = "turn them into numbers, in a function of your own: data.public.function"
            raise data_error(spec.source, f"is not numeric: {types}", remedy)
        self.inputs, self.outputs = inputs, outputs
        (self.num_samples,) = counts[0]
        self.sample_bytes = sum(array.nbytes for array in inputs.values()) // self.num_samples

    def rows(self, start: int, stop: int) -> sources.Block:
        """Return some of the samples."""
        samples, labels = (
            sources.to_records({name: array[start:stop] for name, array in part.items()}, 1)
            for part in (self.inputs, self.outputs)
        )
        return sources.block_at(start, samples, labels)

    def blocks(self, start: int) -> Iterator[sources.Block]:
        """Yield all rows from index `start` on."""
        num_rows = max(1, BLOCK_BYTES // max(1, self.sample_bytes))
        return (self.rows(row, row + num_rows) for row in range(start, self.num_samples, num_rows))


def open_npy_files(tree: Tree, spec: PrepareSpec) -> ArraySource:
    """Map images.npy and labels.npy at the root of `tree`."""
    root = tree.root
    if not ((root / "images.npy").exists() and (root / "labels.npy").exists()):
        raise data_error(spec.source, "lacks one of images.npy and labels.npy", "add the missing file")
    with sources.convert_read_errors(spec.source):
        samples, labels = map_array(root / "images.npy"), map_array(root / "labels.npy")
    return ArraySource({"": samples}, {"": labels}, spec)


def open_npz(path: Path, spec: PrepareSpec) -> ArraySource:
    """Return x and y, images and labels, or y and arrays by input, of an .npz. With `sample_weight`."""
    with (
        sources.convert_read_errors(spec.source),
        BoundedFile(io.FileIO(path)) as file,
        zipfile.ZipFile(file) as archive,
    ):
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        inputs, outputs = _choose_arrays(names, spec)
        if inputs and outputs:
            unread = {*names} - {SAMPLE_WEIGHT, *inputs.values(), *outputs.values()}
            if any("weight" in name.lower() for name in unread):
                problem = f"has weights in an array whose name is not {SAMPLE_WEIGHT}"
                raise data_error(spec.source, problem, f"rename the array to {SAMPLE_WEIGHT}, or remove it")
            if SAMPLE_WEIGHT in names:
                outputs = {name or LABEL: member for name, member in outputs.items()}
                outputs[SAMPLE_WEIGHT] = SAMPLE_WEIGHT
            samples, labels = (
                {name: read_member(archive, member, spec.store) for name, member in part.items()}
                for part in (inputs, outputs)
            )
            return ArraySource(samples, labels, spec)
    there = "" if spec.is_private else f"; it has {list_names(names, 10) or 'none'}"
    several = "for a model with several inputs: y, and an array for each input under its name"
    remedy = f"name a function that returns them, FILE.py:NAME; {several}"
    raise data_error(spec.source, f"has no arrays x and y (or images and labels){there}", remedy)


def _choose_arrays(names: list[str], spec: PrepareSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return the arrays of inputs and of outputs by name, '' for the only one. {} if they are not there."""
    has_inputs = len(spec.inputs) > 1 and set(spec.inputs) <= set(names)
    has_outputs = bool(spec.outputs) and set(spec.outputs) <= set(names)
    for samples, labels in (("x", "y"), ("images", "labels")):
        if samples in names and labels in names and not has_inputs and not has_outputs:
            return {"": samples}, {"": labels}
    label_names = [name for name in LABEL_NAMES if name in names]
    outputs = {"": label_names[0]} if len(label_names) == 1 else {}
    if has_outputs:
        outputs = {name: name for name in spec.outputs}
    inputs = list(spec.inputs) if has_inputs else sorted({*names} - {SAMPLE_WEIGHT, *outputs.values()})
    return {"" if "" in spec.inputs and len(inputs) == 1 else name: name for name in inputs}, outputs


def read_member(archive: zipfile.ZipFile, name: str, store: str) -> Array:
    """Map an array of an .npz file, copied to a nameless file on the disk of `store`.

    Raises ValueError, OSError or an error of zipfile if it is damaged, WorkerError if the disk is too small.
    """
    num_bytes = archive.getinfo(f"{name}.npy").file_size
    with archive.open(f"{name}.npy") as member, tempfile.TemporaryFile(dir=store) as copy:
        with sources.convert_write_errors():
            # Not reserved: the size may be wrong, and other programs would find the disk full meanwhile.
            if num_bytes > shutil.disk_usage(store).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while piece := member.read(COPIED_BYTES):  # to the end, where the archive checks its CRC
            with sources.convert_write_errors():
                copy.write(piece)
        with sources.convert_write_errors():
            copy.flush()
        return map_file(copy)


def is_table(file: sources.DataFile, tree: Tree) -> bool:
    """Return whether a file has the name of a .csv file."""
    return tree.path_of(file).suffix.lower() == ".csv"


def read_columns(path: Path, source: str) -> list[str]:
    """Return the names of the columns of a .csv file. Raises WorkerError, exit code 2."""
    with (
        sources.convert_read_errors(source, is_text=True),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
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
    table, is_by_name = spec.table, list(spec.inputs) not in ([], [""])
    expected = list(spec.inputs if is_by_name else spec.columns)
    paths = [tree.path_of(file) for file in tree.files if is_table(file, tree)]
    columns = _read_header(paths, spec)
    features = _choose_features(columns, table, spec, expected, is_by_name=is_by_name)
    used = [*features, *table.labels, *filter(None, [table.weight])]
    numbers = _read_numbers(paths, columns, used, spec)
    column = dict(zip(used, numbers.T, strict=True))
    inputs = {"": numbers[:, : len(features)]}
    if is_by_name:
        inputs = {name: _as_input(column[name]).reshape(-1, *spec.inputs[name]) for name in features}
    outputs = {name: _as_label(column[name], spec) for name in table.labels}
    if len(outputs) == 1 or not spec.outputs:
        labels = list(outputs.values())
        outputs = {"": labels[0] if len(labels) == 1 else np.stack(labels, axis=1)}
    if table.weight:
        outputs = {name or LABEL: array for name, array in outputs.items()}
        outputs[SAMPLE_WEIGHT] = column[table.weight]
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
    headers = {path: read_columns(path, spec.source) for path in paths}
    columns = headers[paths[0]] if paths else []
    if not columns:
        raise sources.empty_data_error(spec.source)
    for path, header in headers.items():
        if header != columns or len(set(header)) != len(header):
            names = "" if spec.is_private or len(paths) == 1 else f": {paths[0].name} and {path.name}"
            problem = f"has .csv files with different columns, or a column twice{names}"
            raise data_error(spec.source, problem, "give all the same header")
    return columns


def _choose_features(
    columns: list[str], table: TableSchema, spec: PrepareSpec, expected: list[str], *, is_by_name: bool
) -> list[str]:
    """Return the columns with the model's inputs, those that are `expected` if any. Raises WorkerError."""
    features = [name for name in columns if name not in table.named]
    if missing := [name for name in table.named if name not in columns]:
        there = "" if spec.is_private else f", but {list_names(columns)}"
        problem = f"has no column {list_names(missing)}{there}"
        raise data_error(spec.source, problem, "fix data.csv in job.yaml")
    if missing := [name for name in expected if name not in features]:
        problem = f"has no column {list_names(missing)} for the model's inputs"
        remedy = "name inputs after columns, or let the model have one input for all"
        raise data_error(spec.source, problem, remedy)
    if not features:
        raise data_error(spec.source, "has no columns but labels", "fix data.csv in job.yaml")
    if "" in features and not expected:
        remedy = 'leave it out: data.csv.drop: [""], or write the file without an index'
        raise data_error(spec.source, "has a column without a name", remedy)
    added = set(features) - set(expected)
    if added and expected and not is_by_name:
        names = "" if spec.is_private else f": {list_names(sorted(added))}"
        problem = f"has columns that the public data does not have{names}"
        raise data_error(spec.source, problem, "remove them from its file")
    return expected or features


def _read_numbers(paths: Sequence[Path], columns: list[str], names: list[str], spec: PrepareSpec) -> Array:
    """Map the numbers of some columns, float64, shape (n, columns), in a nameless file on the store."""
    rows = _rows(paths, columns, names, spec)
    with tempfile.TemporaryFile(dir=spec.store) as copy:
        with sources.convert_write_errors():
            while block := list(itertools.islice(rows, ROWS_AT_ONCE)):
                copy.write(np.array(block, np.float64).data)
            copy.flush()
        if not copy.tell():
            raise sources.empty_data_error(spec.source)
        return np.memmap(copy, np.float64, "r").reshape(-1, len(names))


def _rows(
    paths: Sequence[Path], columns: list[str], names: list[str], spec: PrepareSpec
) -> Iterator[list[float]]:
    places = [columns.index(name) for name in names]
    for path in paths:
        with (
            sources.convert_read_errors(spec.source, is_text=True),
            path.open(newline="", encoding="utf-8-sig") as file,
        ):
            reader = csv.reader(file)
            next(reader)
            for cells in filter(None, reader):
                try:
                    if len(cells) > len(columns):
                        raise UnusableError("a row with more cells than the header")
                    cells.extend([""] * (len(columns) - len(cells)))
                    yield [_number(cells[place].strip(), columns[place], spec) for place in places]
                except UnusableError as error:
                    of_file = f" of {path.name}" if len(paths) > 1 and not spec.is_private else ""
                    problem = f"has {error}, line {reader.line_num}{of_file}"
                    raise data_error(spec.source, problem, MEND_TABLE) from None


def _number(text: str, name: str, spec: PrepareSpec) -> float:
    with contextlib.suppress(ValueError):
        value = float(text.replace("_", "text"))  # Python's numbers may have underscores, such as 2024_01
        if math.isfinite(value) or spec.allows_nan:
            return value
    content = "empty cells" if not text else "text, or numbers that are not finite"
    raise UnusableError(f"{content} in column {name}")
