"""Arrays of prepared data: headers that lie, swapped files, random ones like them, digests."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.data.arrays import (
    MAX_HEADER_BYTES,
    CheckedArray,
    as_labels,
    as_samples,
    dtype_from_text,
    dtype_to_text,
    map_array,
    random_batch,
)
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo
from tests.unit.worker.ingest.prepared_data import sha256

SAMPLES = np.arange(60, dtype=np.uint8).reshape(10, 2, 3)


def with_header(path: Path, header: str, body: bytes = bytes(60), version: int = 1) -> Path:
    """Write a .npy file with any header."""
    text = header.encode("latin1")
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + text + body)
    return path


def header(descr: str = "'|u1'", shape: str = "(10, 2, 3)", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def test_array_is_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", SAMPLES)
    array = map_array(tmp_path / "a.npy")
    assert isinstance(array, np.memmap)
    assert np.array_equal(array, SAMPLES)
    np.save(tmp_path / "b.npy", np.asfortranarray(SAMPLES))
    assert np.array_equal(map_array(tmp_path / "b.npy"), SAMPLES)
    np.save(tmp_path / "c.npy", np.zeros((0, 4), np.float32))
    assert map_array(tmp_path / "c.npy").shape == (0, 4)


@pytest.mark.parametrize(
    "text",
    [
        header(shape="(11, 2, 3)"),
        header(shape="(-10, -2, 3)"),
        header(shape=f"({10**30},)"),
        header(shape="()"),
        header(descr="'|O'", shape="(10,)"),
        header(descr="'<M8[s]'", shape="(10,)"),
        header(descr="[('a', '|O')]", shape="(10,)"),
        header(descr="'no type'"),
        "__import__('os').abort()\n",
        "(" * (MAX_HEADER_BYTES - 10),
        "x" * (MAX_HEADER_BYTES + 10),
        "",
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_header_that_lies_is_refused(tmp_path: Path, text: str, version: int) -> None:
    path = with_header(tmp_path / "a.npy", text, version=version)
    with pytest.raises(WorkerError, match="cannot be read: ValueError"):
        CheckedArray(str(path), sha256(path))


FIELDS = json.dumps([["kind", "int32", [4]], ["age", "float32", []], ["sample_weight", "float32", []]])


def random(info: DatasetInfo, **options: int) -> tuple[np.ndarray, np.ndarray]:
    return random_batch(np.random.default_rng(0), info, 500, **options)


def test_labels_of_several_outputs_are_in_range() -> None:
    info = DatasetInfo("d", 9, (3,), "float32", (), -1, "f", label_dtype=FIELDS, max_labels={"kind": 2})
    samples, labels = random(info)
    assert (samples.shape, samples.dtype) == ((500, 3), np.float32)
    assert labels.dtype == dtype_from_text(FIELDS)
    assert np.unique(labels["kind"]).tolist() == [0, 1, 2]
    assert 0 <= labels["age"].min() < labels["age"].max() < 1


@pytest.mark.parametrize(
    ("dtype", "largest", "options", "highest"),
    [
        ("int64", {"": 5}, {}, 5),
        ("int32", {"": 0}, {}, 0),
        ("int16", {"": -1}, {}, 0),
        ("uint8", {}, {}, 127),
        ("int64", {}, {}, 127),
        *(("int64", largest, {"num_indices": 40}, 39) for largest in ({"": 119}, {})),
        ("int64", {"": 5}, {"num_indices": 40}, 5),
    ],
)
def test_indices_are_in_range(
    dtype: str, largest: dict[str, int], options: dict[str, int], highest: int
) -> None:
    """Columns of one input may be indices of several embeddings."""
    samples, _ = random(DatasetInfo("d", 9, (7,), dtype, (), 2, "f", max_values=largest), **options)
    assert (samples.min(), samples.max(), str(samples.dtype)) == (0, highest, dtype)


def test_types_of_fields_are_those_that_ranks_use() -> None:
    records = np.zeros(3, [("a", "u1", (2,)), ("b", ">f8"), ("c", "?")])
    floats = '["b", "float32", []], ["c", "float32", []]]'
    assert dtype_to_text(as_labels(records).dtype) == f'[["a", "int32", [2]], {floats}'
    assert dtype_to_text(as_samples(records).dtype) == f'[["a", "uint8", [2]], {floats}'
    plain = np.zeros(3, np.float16)
    assert as_samples(plain) is plain
