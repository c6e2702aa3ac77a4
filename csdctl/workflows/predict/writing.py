"""The output of `predict` as CSV, Parquet or npz; written aside and renamed, so that no one sees half of it.

Each row has the data set, the node where the sample lies, and the sample's number there; no file name.
"""

import csv
import importlib.util
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from csdctl.documents import write_atomically
from csdctl.errors import InputError

CSV, PARQUET, NPZ = ".csv", ".parquet", ".npz"
ROWS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Block:
    """Results of one data set of one machine."""

    data: str
    node: str
    rows: Any
    """The number of each sample in its data set there, shape (n,), ascending."""
    fields: Mapping[str, Any]
    """Values that were asked for by name, each of shape (n, …)."""
    num_computed: int = 0
    """Rows that no earlier call had computed."""

    def __len__(self) -> int:
        return len(self.rows)


def check_output(path: Path) -> None:
    """Raise InputError for a suffix that cannot be written, or a package that is missing for it."""
    if path.suffix not in WRITERS:
        raise InputError(
            f"--output {path} ends in {path.suffix or 'nothing'!r}", remedy=f"one of {', '.join(WRITERS)}"
        )
    if path.is_dir():
        raise InputError(f"--output {path} is a directory", remedy="name a file")
    if path.suffix == PARQUET and importlib.util.find_spec("pyarrow") is None:
        raise InputError(
            "Parquet files need the package pyarrow, which is not installed",
            remedy="pip install 'csdctl[parquet]', or choose another --output: .csv, .npz",
        )


def write_results(path: Path, blocks: Sequence[Block], names: Sequence[str]) -> None:
    """Write all rows in the order of `blocks`; `names` are those of the classes, none if unknown.

    Raises OSError.
    """
    with write_atomically(path) as file:
        WRITERS[path.suffix](file, blocks, names)


def _write_csv(file: BinaryIO, blocks: Sequence[Block], names: Sequence[str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    for number, columns in enumerate(_chunks(blocks, names)):
        if not number:
            writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    text.detach()


def _chunks(blocks: Sequence[Block], names: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """Yield columns of plain values by name, some rows at a time; vectors have a column for each number."""
    parts = ((block, start) for block in blocks for start in range(0, max(1, len(block)), ROWS_AT_ONCE))
    for block, start in parts:
        part = slice(start, start + ROWS_AT_ONCE)
        rows = block.rows[part]
        columns: dict[str, list[Any]] = {
            "data": [block.data] * len(rows),
            "node": [block.node] * len(rows),
            "row": rows.tolist(),
        }
        for name, array in block.fields.items():
            values = array[part].reshape(len(rows), math.prod(array.shape[1:]))
            lists = [[_shortest(value) for value in column] for column in values.T]
            if array.ndim == 1:
                columns[name] = lists[0]
                if names and name.rpartition(".")[2] == "class":
                    # A model may have more classes than the data.
                    named = dict(enumerate(names))
                    columns[f"{name}_name"] = [named.get(number, "") for number in lists[0]]
            else:
                columns |= {f"{name}_{number}": column for number, column in enumerate(lists)}
        yield columns


def _shortest(value: Any) -> Any:
    """Return an int, or the shortest float that float32 reads as the same."""
    return int(value) if value.dtype.kind == "i" else float(str(value))


def _write_npz(file: BinaryIO, blocks: Sequence[Block], names: Sequence[str]) -> None:
    import numpy as np

    arrays: dict[str, Any] = {
        "data": np.array([block.data for block in blocks for _ in range(len(block))], "U"),
        "node": np.array([block.node for block in blocks for _ in range(len(block))], "U"),
        "row": np.concatenate([block.rows for block in blocks]),
        "class_names": np.array(list(names), "U"),
    }
    for name in blocks[0].fields:
        arrays[name] = np.concatenate([block.fields[name] for block in blocks])
    np.savez(file, **arrays)


def _write_parquet(file: BinaryIO, blocks: Sequence[Block], names: Sequence[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    writer = None
    for columns in _chunks(blocks, names):
        table = pyarrow.table(columns) if writer is None else pyarrow.table(columns, schema=writer.schema)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()


WRITERS: dict[str, Callable[[BinaryIO, Sequence[Block], Sequence[str]], None]] = {
    CSV: _write_csv,
    PARQUET: _write_parquet,
    NPZ: _write_npz,
}
