"""Tables: .csv files with a header, of numbers only. No error contains a value."""

import csv
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources.arrays import convert_read_errors, empty_data_error
from csdctl.worker.ingest.sources.source import (
    Block,
    DataFile,
    IngestLimits,
    SampleSource,
    Tree,
    data_error,
    to_records,
)
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec, TableSchema, list_names


def is_table(file: DataFile, tree: Tree) -> bool:
    """Return whether a file has the name of a .csv file."""
    return tree.path_of(file).suffix.lower() == ".csv"


def read_columns(path: Path, source: str) -> list[str]:
    """Return the names of the columns of a .csv file; raises WorkerError, exit code 2."""
    with convert_read_errors(source), path.open(newline="", encoding="utf-8-sig") as file:
        return [name.strip() for name in next(csv.reader(file), [])]


class TableFiles(SampleSource):
    """The rows of .csv files, in order of their paths: a vector of numbers, or an input for each column."""

    def __init__(self, tree: Tree, spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, for columns that are missing or have anything but numbers."""
        if spec.table is None:
            problem = "consists of .csv files, but the job does not describe them"
            raise data_error(spec.source, problem, "set data.csv in job.yaml: {label: COLUMN}")
        super().__init__(spec)
        self._spec = spec
        self._schema: TableSchema = spec.table
        self._paths = [tree.path_of(file) for file in tree.files if is_table(file, tree)]
        self._columns = self._read_header()
        self._features = self._choose_features()
        self.num_samples, self._are_integers = self._examine()
        self.sample_bytes = 4 * len(self._features)

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all rows from index `start` on."""
        num_rows = max(1, min(limits.block_samples, limits.block_bytes // (8 * len(self._columns))))
        used = [*self._features, *self._schema.labels, *filter(None, [self._schema.weight])]
        found = itertools.islice(self._rows(used), start, None)
        while rows := list(itertools.islice(found, num_rows)):
            column = dict(zip(used, np.array(rows, np.float64).T, strict=True))
            yield Block(self._samples(column), self._labels(column))

    def _samples(self, column: dict[str, Array]) -> Array:
        if not self._is_by_name:
            return np.stack([column[name] for name in self._features], axis=1).astype(np.float32)
        shapes = self._spec.inputs
        return to_records(
            {name: column[name].astype(np.float32).reshape(-1, *shapes[name]) for name in self._features}, 1
        )

    def _labels(self, column: dict[str, Array]) -> Array:
        kinds = [np.int32 if is_integer else np.float32 for is_integer in self._are_integers]
        labels = {
            name: column[name].astype(kind) for name, kind in zip(self._schema.labels, kinds, strict=True)
        }
        if len(labels) == 1 or not self._spec.outputs:
            parts = list(labels.values())
            labels = {"": parts[0] if len(parts) == 1 else np.stack(parts, axis=1)}
        if self._schema.weight:
            labels = {name or LABEL: array for name, array in labels.items()}
            labels[SAMPLE_WEIGHT] = column[self._schema.weight].astype(np.float32)
        return to_records(labels, 1)

    @property
    def _is_by_name(self) -> bool:
        return bool(self._spec.inputs) and list(self._spec.inputs) != [""]

    def _read_header(self) -> list[str]:
        columns, *others = [read_columns(path, self._spec.source) for path in self._paths] or [[]]
        if not columns:
            raise empty_data_error(self._spec.source)
        if any(header != columns for header in others) or len(set(columns)) != len(columns):
            raise self._error(
                "has .csv files with different columns, or a column twice", "give all the same header"
            )
        return columns

    def _choose_features(self) -> list[str]:
        """Return the columns with the model's inputs; raises WorkerError if columns are missing."""
        schema, by_name = self._schema, list(self._spec.inputs) if self._is_by_name else []
        others = [*schema.labels, *filter(None, [schema.weight]), *schema.dropped]
        features = [name for name in self._columns if name not in others]
        if missing := [name for name in others if name not in self._columns]:
            known = "" if self._spec.is_private else f", but {list_names(self._columns)}"
            raise self._error(f"has no column {list_names(missing)}{known}", "fix data.csv in job.yaml")
        if missing := [name for name in by_name if name not in features]:
            raise self._error(
                f"has no column {list_names(missing)} for the model's inputs",
                "name inputs after columns, or let the model have one input for all",
            )
        if not features:
            raise self._error("has no columns but labels", "fix data.csv in job.yaml")
        return by_name or features

    def _examine(self) -> tuple[int, list[bool]]:
        """Return the number of rows, and which columns of labels have integers only, by reading all."""
        num_rows, are_integers = 0, [True] * len(self._schema.labels)
        for labels in self._rows(self._schema.labels):
            num_rows += 1
            are_integers = [
                was and value.is_integer() for was, value in zip(are_integers, labels, strict=True)
            ]
        if not num_rows:
            raise empty_data_error(self._spec.source)
        return num_rows, are_integers

    def _rows(self, names: Sequence[str]) -> Iterator[list[float]]:
        """Yield the numbers of some columns, row by row."""
        places = [self._columns.index(name) for name in names]
        for path in self._paths:
            with convert_read_errors(self._spec.source), path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file)
                next(reader, None)
                for row in reader:
                    if row:
                        yield [self._number(row, place) for place in places]

    def _number(self, row: list[str], place: int) -> float:
        text = row[place].strip() if place < len(row) else ""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return value
        found = "empty cells" if not text else "text, or numbers that are not finite"
        raise self._error(
            f"has {found} in column {self._columns[place]}",
            "leave the column out (data.csv.drop), or turn it into numbers in a function of your own",
        )

    def _error(self, problem: str, remedy: str) -> WorkerError:
        return data_error(self._spec.source, problem, remedy)
