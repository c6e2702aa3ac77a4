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
        self._schema: TableSchema = spec.table
        self._spec = spec
        self._paths = [tree.path_of(file) for file in tree.files if is_table(file, tree)]
        self._columns = self._read_header()
        self._features = self._choose_features()
        self.num_samples, self._are_integers = self._examine()
        self.sample_bytes = 4 * len(self._features)

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all rows from index `start` on."""
        num_rows = max(1, min(limits.block_samples, limits.block_bytes // (8 * len(self._columns))))
        found = itertools.islice(self._rows(self._used), start, None)
        while rows := list(itertools.islice(found, num_rows)):
            values = np.array(rows, np.float64)
            column = {name: values[:, number] for number, name in enumerate(self._used)}
            yield Block(self._samples(values), self._labels(column))

    @property
    def _used(self) -> list[str]:
        return [*self._features, *self._schema.labels, *self._weight]

    @property
    def _weight(self) -> list[str]:
        return [self._schema.weight] if self._schema.weight else []

    def _samples(self, values: Array) -> Array:
        features: Array = values[:, : len(self._features)].astype(np.float32)
        if not self._is_by_name:
            return features
        shapes = self._spec.inputs
        columns = enumerate(self._features)
        return to_records({name: features[:, n].reshape(-1, *shapes[name]) for n, name in columns}, 1)

    def _labels(self, column: dict[str, Array]) -> Array:
        names = self._schema.labels
        kinds = [np.int32 if is_integer else np.float32 for is_integer in self._are_integers]
        typed = {name: column[name].astype(kind) for name, kind in zip(names, kinds, strict=True)}
        if len(names) == 1:
            labels = {"": typed[names[0]]}
        else:
            labels = typed if self._spec.outputs else {"": np.stack(list(typed.values()), axis=1)}
        if self._schema.weight:
            labels = {name or LABEL: array for name, array in labels.items()}
            labels[SAMPLE_WEIGHT] = column[self._schema.weight].astype(np.float32)
        return to_records(labels, 1)

    def _read_header(self) -> list[str]:
        headers = [read_columns(path, self._spec.source) for path in self._paths]
        if not headers or not headers[0]:
            raise empty_data_error(self._spec.source)
        columns = headers[0]
        if any(header != columns for header in headers) or len(set(columns)) != len(columns):
            raise self._error(
                "has .csv files with different columns, or a column twice", "give all the same header"
            )
        schema = self._schema
        named = [*schema.labels, *self._weight, *schema.dropped]
        if missing := [name for name in named if name not in columns]:
            others = "" if self._spec.is_private else f", but {list_names(columns)}"
            raise self._error(f"has no column {list_names(missing)}{others}", "fix data.csv in job.yaml")
        return columns

    @property
    def _is_by_name(self) -> bool:
        return bool(self._spec.inputs) and list(self._spec.inputs) != [""]

    def _choose_features(self) -> list[str]:
        schema = self._schema
        others = {*schema.labels, schema.weight, *schema.dropped}
        features = [name for name in self._columns if name not in others]
        if self._is_by_name:
            if missing := [name for name in self._spec.inputs if name not in features]:
                raise self._error(
                    f"has no column {list_names(missing)} for the model's inputs",
                    "name inputs after columns, or let the model have one input for all",
                )
            features = list(self._spec.inputs)
        if not features:
            raise self._error("has no columns but labels", "fix data.csv in job.yaml")
        return features

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
