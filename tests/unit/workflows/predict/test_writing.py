"""Files of predictions: rows in order, values that read as they were, refusals before any work."""

import csv
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from csdctl.workflows.predict.predict import Block, write_results

NAMES = ["cat", "dog"]


def classes(node: str, values: list[int]) -> Block:
    fields = {
        "class": np.array(values, np.int32),
        "probability": np.array([0.1 + value for value in values], np.float32),
    }
    return Block("private", node, np.arange(len(values)), fields)


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_classes_have_names_where_these_are_known(tmp_path: Path) -> None:
    blocks = [classes("csd0", [1]), classes("csd1", [0, 1])]
    write_results(tmp_path / "named.csv", blocks, NAMES)
    assert read(tmp_path / "named.csv") == [
        ["data", "node", "row", "class", "class_name", "probability"],
        ["private", "csd0", "0", "1", "dog", "1.1"],
        ["private", "csd1", "0", "0", "cat", "0.1"],
        ["private", "csd1", "1", "1", "dog", "1.1"],
    ]
    write_results(tmp_path / "more.csv", [classes("csd0", [2])], NAMES)
    assert read(tmp_path / "more.csv")[1][3:5] == ["2", ""]
    write_results(tmp_path / "plain.csv", blocks, [])
    assert read(tmp_path / "plain.csv")[0] == ["data", "node", "row", "class", "probability"]
    write_results(tmp_path / "named.parquet", blocks, NAMES)
    table = parquet.read_table(tmp_path / "named.parquet").to_pydict()
    assert table["node"] == ["csd0", "csd1", "csd1"]
    assert table["class_name"] == ["dog", "cat", "dog"]
    assert table["row"] == [0, 0, 1]


def test_vectors_have_a_column_for_each_number(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(2, 2, 3) / 7
    write_results(tmp_path / "a.csv", [Block("public", "host", np.array([4, 9]), {"value": values})], NAMES)
    header, *rows = read(tmp_path / "a.csv")
    assert header == ["data", "node", "row", *(f"value_{number}" for number in range(6))]
    assert [row[2] for row in rows] == ["4", "9"]
    assert np.array([row[3:] for row in rows]).astype(np.float32).tolist() == values.reshape(2, 6).tolist()


def test_npz_has_arrays_of_all_rows(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    blocks = [Block("private", node, np.arange(2), {"value": values}) for node in ("csd0", "csd1")]
    write_results(tmp_path / "a.npz", blocks, NAMES)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert arrays["node"].tolist() == ["csd0", "csd0", "csd1", "csd1"]
        assert arrays["row"].tolist() == [0, 1, 0, 1]
        assert arrays["value"].tolist() == [*values.tolist(), *values.tolist()]
        assert arrays["class_names"].tolist() == NAMES


def test_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("earlier")
    broken = Block("private", "csd1", np.arange(3), {"class": np.zeros(2, np.int32)})
    with pytest.raises(ValueError, match="reshape"):
        write_results(path, [classes("csd0", [1]), broken], [])
    assert path.read_text() == "earlier"
    assert [file.name for file in tmp_path.iterdir()] == ["a.csv"]
