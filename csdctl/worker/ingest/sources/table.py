"""Tables: .csv files with a header, of numbers only. No error contains a value."""

import csv
import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources.arrays import ArraySource, convert_read_errors, empty_data_error
from csdctl.worker.ingest.sources.source import DataFile, Tree, convert_write_errors, data_error
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec, TableSchema, list_names

_ROWS_AT_A_TIME = 256


def is_table(file: DataFile, tree: Tree) -> bool:
    """Return whether a file has the name of a .csv file."""
    return tree.path_of(file).suffix.lower() == ".csv"


def read_columns(path: Path, source: str) -> list[str]:
    """Return the names of the columns of a .csv file; raises WorkerError, exit code 2."""
    with convert_read_errors(source), path.open(newline="", encoding="utf-8-sig") as file:
        return [name.strip() for name in next(csv.reader(file), [])]


def open_table(tree: Tree, spec: PrepareSpec) -> ArraySource:
    """Return the rows of .csv files, in order of their paths: a vector of numbers, or an input by column.

    Raises WorkerError, exit code 2, for columns that are missing or have anything but numbers.
    """
    if spec.table is None:
        problem = "consists of .csv files, but the job does not describe them"
        raise data_error(spec.source, problem, "set data.csv in job.yaml: {label: COLUMN}")
    schema, is_by_name = spec.table, bool(spec.inputs) and list(spec.inputs) != [""]
    paths = [tree.path_of(file) for file in tree.files if is_table(file, tree)]
    columns = _read_header(paths, spec)
    features = _choose_features(columns, schema, spec, list(spec.inputs) if is_by_name else [])
    used = [*features, *schema.labels, *filter(None, [schema.weight])]
    numbers = _read_numbers(paths, columns, used, spec)
    column = dict(zip(used, numbers.T, strict=True))
    inputs = {"": numbers[:, : len(features)]}
    if is_by_name:
        inputs = {name: column[name].reshape(-1, *spec.inputs[name]) for name in features}
    outputs = {name: _as_label(column[name]) for name in schema.labels}
    if len(outputs) == 1 or not spec.outputs:
        parts = list(outputs.values())
        outputs = {"": parts[0] if len(parts) == 1 else np.stack(parts, axis=1)}
    if schema.weight:
        outputs = {name or LABEL: array for name, array in outputs.items()}
        outputs[SAMPLE_WEIGHT] = column[schema.weight]
    return ArraySource(inputs, outputs, spec)


def _as_label(values: Array) -> Array:
    """Return a column of labels as int32 if it has integers only."""
    return values.astype(np.int32 if (values == np.rint(values)).all() else np.float32)


def _read_header(paths: Sequence[Path], spec: PrepareSpec) -> list[str]:
    columns, *others = [read_columns(path, spec.source) for path in paths] or [[]]
    if not columns:
        raise empty_data_error(spec.source)
    if any(header != columns for header in others) or len(set(columns)) != len(columns):
        problem = "has .csv files with different columns, or a column twice"
        raise data_error(spec.source, problem, "give all the same header")
    return columns


def _choose_features(
    columns: Sequence[str], schema: TableSchema, spec: PrepareSpec, by_name: list[str]
) -> list[str]:
    """Return the columns with the model's inputs; raises WorkerError if columns are missing."""
    others = [*schema.labels, *filter(None, [schema.weight]), *schema.dropped]
    features = [name for name in columns if name not in others]
    if missing := [name for name in others if name not in columns]:
        known = "" if spec.is_private else f", but {list_names(columns)}"
        raise data_error(
            spec.source, f"has no column {list_names(missing)}{known}", "fix data.csv in job.yaml"
        )
    if missing := [name for name in by_name if name not in features]:
        problem = f"has no column {list_names(missing)} for the model's inputs"
        remedy = "name inputs after columns, or let the model have one input for all"
        raise data_error(spec.source, problem, remedy)
    if not features:
        raise data_error(spec.source, "has no columns but labels", "fix data.csv in job.yaml")
    return by_name or features


def _read_numbers(paths: Sequence[Path], columns: list[str], names: list[str], spec: PrepareSpec) -> Array:
    """Map the numbers of some columns, float64, shape (n, columns), in a nameless file on the store."""
    with tempfile.TemporaryFile(dir=spec.store) as copy:
        found = _rows(paths, columns, names, spec.source)
        with convert_write_errors():
            while rows := list(itertools.islice(found, _ROWS_AT_A_TIME)):
                copy.write(np.array(rows, np.float64).data)
            copy.flush()
        if not copy.tell():
            raise empty_data_error(spec.source)
        return np.memmap(copy, np.float64, "r").reshape(-1, len(names))


def _rows(paths: Sequence[Path], columns: list[str], names: list[str], source: str) -> Iterator[list[float]]:
    for path in paths:
        with convert_read_errors(source), path.open(newline="", encoding="utf-8-sig") as file:
            next(csv.reader(file), None)
            for row in csv.DictReader(file, columns, restval=""):
                yield [_number(row[name].strip(), name, source) for name in names]


def _number(text: str, name: str, source: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    found = "empty cells" if not text else "text, or numbers that are not finite"
    remedy = "leave the column out (data.csv.drop), or turn it into numbers in a function of your own"
    raise data_error(source, f"has {found} in column {name}", remedy)
