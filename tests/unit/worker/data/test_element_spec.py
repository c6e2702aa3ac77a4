"""Random samples and labels have the shapes, types and ranges of real ones."""

import json

import numpy as np
import pytest

from csdctl.worker.data.arrays import as_labels, as_samples, dtype_from_text, dtype_to_text, random_batch
from csdctl.worker.protocol.datasets import DatasetInfo

FIELDS = json.dumps([["kind", "int32", [4]], ["age", "float32", []], ["sample_weight", "float32", []]])


def random(info: DatasetInfo, count: int = 500) -> tuple[np.ndarray, np.ndarray]:
    return random_batch(np.random.default_rng(0), info, count)


def test_labels_of_several_outputs_are_in_range() -> None:
    info = DatasetInfo("d", 9, (3,), "float32", (), -1, "f", label_dtype=FIELDS, max_labels={"kind": 2})
    samples, labels = random(info)
    assert (samples.shape, samples.dtype) == ((500, 3), np.float32)
    assert labels.dtype == dtype_from_text(FIELDS)
    assert np.unique(labels["kind"]).tolist() == [0, 1, 2]
    assert 0 <= labels["age"].min() < labels["age"].max() < 1


@pytest.mark.parametrize(
    ("dtype", "largest", "highest"),
    [
        ("int64", {"": 5}, 5),
        ("int32", {"": 0}, 0),
        ("int16", {"": -1}, 0),
        ("uint8", {}, 127),
        ("int64", {}, 127),
    ],
)
def test_indices_are_in_range(dtype: str, largest: dict[str, int], highest: int) -> None:
    samples, _ = random(DatasetInfo("d", 9, (7,), dtype, (), 2, "f", max_values=largest))
    assert (samples.min(), samples.max(), str(samples.dtype)) == (0, highest, dtype)


@pytest.mark.parametrize(("largest", "dtype"), [(6, "int32"), (-1, "float32")])
def test_descriptions_of_earlier_versions_have_plain_labels(largest: int, dtype: str) -> None:
    _, labels = random(DatasetInfo("d", 9, (2,), "uint8", (3,), largest, "f"))
    assert (labels.shape, str(labels.dtype)) == ((500, 3), dtype)
    assert labels.max() <= max(largest, 1)


def test_negative_labels_of_integers_stay_integers() -> None:
    _, labels = random(DatasetInfo("d", 9, (2,), "uint8", (), -1, "f", label_dtype="int32"))
    assert (str(labels.dtype), labels.max()) == ("int32", 0)


def test_types_of_fields_are_those_that_ranks_use() -> None:
    records = np.zeros(3, [("a", "u1", (2,)), ("b", ">f8"), ("c", "?")])
    assert (
        dtype_to_text(as_labels(records).dtype)
        == '[["a", "int32", [2]], ["b", "float32", []], ["c", "float32", []]]'
    )
    assert (
        dtype_to_text(as_samples(records).dtype)
        == '[["a", "uint8", [2]], ["b", "float32", []], ["c", "float32", []]]'
    )
    plain = np.zeros(3, np.float16)
    assert as_samples(plain) is plain


@pytest.mark.parametrize(("largest", "highest"), [({"": 119}, 39), ({"": 5}, 5), ({}, 39)])
def test_columns_of_one_input_may_be_indices_of_several_embeddings(
    largest: dict[str, int], highest: int
) -> None:
    info = DatasetInfo("d", 9, (2,), "int64", (), 1, "f", max_values=largest)
    samples, _ = random_batch(np.random.default_rng(0), info, 500, num_indices=40)
    assert (samples.min(), samples.max()) == (0, highest)
