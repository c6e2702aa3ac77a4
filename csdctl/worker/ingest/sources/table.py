"""Tables of numbers: .csv files with a header. No error contains a value."""

import contextlib
import csv
import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources.arrays import ArraySource
from csdctl.worker.ingest.sources.source import (
    DataFile,
    Tree,
    UnusableError,
    convert_read_errors,
    convert_write_errors,
    data_error,
    empty_data_error,
)
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec, TableSchema, list_names

MEND_TABLE = (
    "leave columns out (data.csv.drop), write decimal points, quote commas, or turn text into numbers in "
    "your own function; data.allow_nan: true keeps nan"
)
ROWS_AT_ONCE = 256


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


def open_table(tree: Tree, spec: PrepareSpec, threads: int) -> ArraySource:
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
        raise empty_data_error(spec.source)
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
        with convert_write_errors():
            while block := list(itertools.islice(rows, ROWS_AT_ONCE)):
                copy.write(np.array(block, np.float64).data)
            copy.flush()
        if not copy.tell():
            raise empty_data_error(spec.source)
        return np.memmap(copy, np.float64, "r").reshape(-1, len(names))


def _rows(
    paths: Sequence[Path], columns: list[str], names: list[str], spec: PrepareSpec
) -> Iterator[list[float]]:
    places = [columns.index(name) for name in names]
    for path in paths:
        with (
            convert_read_errors(spec.source, is_text=True),
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
