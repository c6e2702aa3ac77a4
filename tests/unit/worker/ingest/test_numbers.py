"""Numbers are kept or refused: types, ranges, NaN and infinity of samples, labels and weights, by row."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec, TableSchema
from tests.unit.worker.ingest.prepared_data import SECRET, arrays_of, refusal, slice_of, spec_below

BIG = np.array([3_000_000_000, 1, 2])
FEW = np.array([2, 0, 1])
X = np.ones((3, 2), np.float32)
NPZ = f"{SECRET}.npz"


@pytest.fixture
def spec(tmp_path: Path) -> PrepareSpec:
    return spec_below(tmp_path)


def write(root: Path, **arrays: Any) -> None:
    np.savez(root / NPZ, **{"x": X, **arrays})


def write_npy(root: Path, y: Any) -> None:
    """Write arrays that are used in place, unless their types are others than those that are used."""
    np.save(root / "images.npy", X)
    np.save(root / "labels.npy", y)


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        (BIG, np.float32),
        (-BIG, np.float32),
        (BIG.astype(np.uint64) + np.uint64(1 << 63), np.float32),
        (BIG.astype(">i8"), np.float32),
        (FEW, np.float32),
        (FEW.astype(np.uint8), np.int32),
        (FEW.astype(bool), np.float32),
        (np.asfortranarray(np.stack([BIG, FEW], axis=1)), np.float32),
        (FEW.astype(np.float16), np.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("write", [write, write_npy])
def test_labels_of_a_regression_are_those_of_the_loss_of_fit(
    root: Path, spec: PrepareSpec, labels: Any, dtype: Any, write: Callable[..., None]
) -> None:
    write(root, y=labels)
    info = prepare(replace(spec, is_regression=True))
    read = PreparedSamples(slice_of(info.path)).labels(np.arange(3))
    assert np.array_equal(read, labels.astype(np.float32))
    assert (info.label_dtype, read.dtype) == (np.dtype(dtype), dtype)


@pytest.mark.parametrize(
    "labels",
    [BIG, -BIG, BIG.astype(np.uint32), np.array([1 << 40, 0, 1]), np.array([1 << 63] * 3, np.uint64)],
)
def test_integers_that_int32_does_not_hold_are_refused(root: Path, spec: PrepareSpec, labels: Any) -> None:
    write(root, y=labels)
    assert "float32" in refusal(spec, "integers beyond ±2³¹ in labels")
    write(root, y=labels, sample_weight=np.ones(3))
    refusal(spec, "integers beyond ±2³¹ in label,")
    write_npy(root, labels)
    (root / NPZ).unlink()
    refusal(spec, "integers beyond ±2³¹ in labels")


def test_classes_of_a_regression_stay_integers(root: Path, spec: PrepareSpec) -> None:
    write(root, y=FEW)
    info = prepare(replace(spec, is_regression=True, classes=("a", "b", "c")))
    assert (info.label_dtype, info.class_counts) == ("int32", {"a": 1, "b": 1, "c": 1})


def test_labels_have_the_type_of_the_public_data(root: Path, spec: PrepareSpec) -> None:
    write(root, y=FEW)
    private = replace(spec, is_regression=True, labels={"": ("int32", ())}, is_private=True)
    assert prepare(private).label_dtype == "int32"
    write(root, y=BIG)
    refusal(replace(private, store=f"{spec.store}-2"), "integers beyond")


@pytest.mark.parametrize("weights", [FEW, FEW.astype(np.uint8), BIG, -FEW, np.array([True, False, True])])
def test_weights_are_float32_whatever_they_were(root: Path, spec: PrepareSpec, weights: Any) -> None:
    write(root, y=FEW, sample_weight=weights)
    stored = arrays_of(prepare(spec))[1]["sample_weight"]
    assert np.array_equal(stored, weights.astype(np.float32))
    assert stored.dtype == np.float32


@pytest.mark.parametrize(("weights", "largest"), [([0, 0, 0], 0), ([0, -0.5, 0], 1)])
def test_weights_of_0_are_known(root: Path, spec: PrepareSpec, weights: list[float], largest: int) -> None:
    write(root, y=FEW, sample_weight=np.array(weights))
    assert prepare(spec).max_values == {"sample_weight": largest}


def with_value(value: float, shape: tuple[int, ...] = (3, 2), dtype: Any = np.float64) -> Any:
    array = np.ones(shape, dtype)
    array[1] = value
    return array


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "sample": ({"x": with_value(np.nan)}, "NaN or infinity in samples, row 1 "),
    "large sample": ({"x": with_value(1e39)}, "beyond the range of float32 in samples, row 1 "),
    "label": ({"y": with_value(np.nan, (3,))}, "NaN or infinity in labels, row 1 "),
    "large label": ({"y": with_value(-1e300, (3,))}, "beyond the range of float32 in labels, row 1 "),
    "weight": ({"sample_weight": with_value(-np.inf, (3,))}, "NaN or infinity in sample_weight, row 1 "),
    "input": ({"x": None, "u": X, "v": with_value(np.nan)}, "NaN or infinity in v, row 1 "),
}


@pytest.mark.parametrize(("arrays", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("is_private", [False, True])
def test_nan_and_infinity_are_refused_by_row(
    root: Path, spec: PrepareSpec, arrays: dict[str, Any], message: str, *, is_private: bool
) -> None:
    named = {"x": X, "y": FEW, **arrays}
    np.savez(root / NPZ, **{name: array for name, array in named.items() if array is not None})
    remedy = refusal(replace(spec, is_private=is_private), message)
    assert ("data.allow_nan: true" in remedy) == ("NaN" in message and "weight" not in message)


def test_nan_is_kept_where_the_model_expects_it_but_not_as_a_weight(root: Path, spec: PrepareSpec) -> None:
    spec = replace(spec, allows_nan=True)
    write(root, y=FEW, sample_weight=with_value(np.nan, (3,)))
    refusal(spec, "NaN or infinity in sample_weight, row 1 ")
    write(root, x=with_value(np.nan), y=with_value(np.nan, (3,)))
    samples, labels = arrays_of(prepare(spec))
    assert np.isnan(samples[1]).all()
    assert np.isnan(labels[1])
    with pytest.raises(WorkerError, match="NaN or infinity in samples"):  # nor is what was prepared used
        prepare(replace(spec, allows_nan=False))


def test_row_counts_from_the_start(root: Path, spec: PrepareSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csdctl.worker.ingest.sources.arrays.BLOCK_BYTES", 1000)
    samples = np.ones((5000, 2), np.float32)
    samples[4321, 1] = np.nan
    write_npy(root, np.zeros(5000, np.int64))
    np.save(root / "images.npy", samples)  # which would be used in place
    refusal(spec, "NaN or infinity in samples, row 4321 ")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, 2, 3], object), "cannot be read: it has Python objects, not numbers"),
        (np.array(["2026-01-01"] * 3, "M8[s]"), r"not numeric: float32 and datetime64\[s\]"),
        (np.ones(3) * 1j, "not numeric: float32 and complex128"),
        (np.array(["a", "b", "c"]), "not numeric: float32 and <U1"),
        (np.ones((0,)), "3 samples but 0 labels"),
    ],
    ids=str,
)
def test_what_is_no_number_is_refused(root: Path, spec: PrepareSpec, array: Any, message: str) -> None:
    np.savez(root / NPZ, x=X, y=array)
    assert "damaged" not in refusal(spec, message)


def test_input_keeps_integers_that_float32_does_not_hold(root: Path, spec: PrepareSpec) -> None:
    (root / "t.csv").write_text("user,age,y\n16777217,63,0\n5,41,1\n")
    spec = replace(spec, table=TableSchema(("y",)), inputs={"user": (1,), "age": (1,)})
    info = prepare(spec)
    assert info.inputs == {"user": ("int64", (1,)), "age": ("float32", (1,))}
    assert arrays_of(info)[0]["user"][:, 0].tolist() == [16777217, 5]
