"""The user's own function: what it may return, and that it cannot leak private data."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.data.arrays import open_arrays
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, ImageRule, PrepareSpec
from csdctl.worker.protocol.json_codec import to_json

SECRET = "patient-4711"


@pytest.fixture
def spec(tmp_path: Path) -> PrepareSpec:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"{SECRET}.bin").write_bytes(bytes(range(48)) * 5)
    return PrepareSpec(
        str(tmp_path / "data"),
        str(tmp_path / "store"),
        ImageRule((4, 4, 3)),
        function=f"{tmp_path / 'my_data.py'}:load",
        is_private=True,
    )


def write(spec: PrepareSpec, body: str) -> None:
    text = f"import pathlib\nimport numpy as np\n\n\ndef load(path):\n    {body}\n"
    Path(spec.function.rpartition(":")[0]).write_text(text)


READ = "raw = np.frombuffer(next(pathlib.Path(path).iterdir()).read_bytes(), np.uint8).reshape(5, 4, 4, 3); "


def arrays(info: DatasetInfo) -> tuple[np.ndarray, np.ndarray]:
    return open_arrays(f"{info.path}/images.npy", f"{info.path}/labels.npy")


@pytest.mark.parametrize(
    "statement",
    [
        "return raw, np.arange(5)",
        "return ((image, label) for label, image in enumerate(raw))",
        "return [(image, label) for label, image in enumerate(raw)]",
        "yield from zip(raw, range(5))",
    ],
)
def test_arrays_and_iterators_are_accepted(spec: PrepareSpec, statement: str) -> None:
    write(spec, READ + statement)
    images, labels = arrays(prepare(spec))
    assert images.shape == (5, 4, 4, 3)
    assert images[1, 0, 0].tolist() == [0, 1, 2]
    assert labels.tolist() == [0, 1, 2, 3, 4]


def test_images_from_an_iterator_are_fitted(spec: PrepareSpec) -> None:
    write(spec, "return ((np.full((n, 2 * n), 9, np.uint8), n) for n in range(1, 9))")
    images, _ = arrays(prepare(spec))
    assert images.shape == (8, 4, 4, 3)
    assert np.unique(images).tolist() == [9]


def test_other_samples_are_unchanged(spec: PrepareSpec) -> None:
    write(spec, "return ((np.full(3, n, np.float32), np.eye(2)[n % 2]) for n in range(4))")
    info = prepare(spec)
    assert (info.sample_shape, info.dtype, info.label_shape) == ((3,), "float32", (2,))


def test_changed_function_changes_the_fingerprint(spec: PrepareSpec) -> None:
    write(spec, READ + "return raw, np.arange(5)")
    first = prepare(spec)
    write(spec, READ + "return raw, np.arange(5)[::-1]")
    assert prepare(spec).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError(str(list(pathlib.Path(path).iterdir())))", "load fails: ValueError$"),
        ("raise SystemExit('x')", "load fails: SystemExit$"),
        ("return 7", "load returned a int"),
        ("return iter([1, 2])", "not \\(sample, label\\)"),
        ("return iter([])", "no usable samples"),
        ("return np.zeros((0, 4, 4, 3)), np.zeros(0)", "is empty"),
        ("return np.zeros((3, 4)), np.zeros(2)", "3 samples but 2 labels"),
        ("return iter([('a', 1)])", "returned text or Python objects"),
        ("return iter([(np.zeros(3), 1), (np.zeros(4), 1)])", "different shapes or types"),
        ("yield np.zeros(3), 1; open(path)", "load fails: IsADirectoryError$"),
    ],
)
def test_errors_do_not_contain_the_data(spec: PrepareSpec, body: str, message: str) -> None:
    write(spec, body)
    with pytest.raises(WorkerError, match=message) as raised:
        prepare(spec)
    assert raised.value.exit_code == 2
    assert SECRET not in raised.value.message


def test_missing_function_is_reported(spec: PrepareSpec) -> None:
    write(spec, "return 7")
    with pytest.raises(WorkerError, match="other fails: AttributeError"):
        prepare(replace(spec, function=spec.function.replace(":load", ":other")))


def test_errors_of_public_data_are_complete(spec: PrepareSpec) -> None:
    write(spec, "raise ValueError('column 3 is missing')")
    with pytest.raises(WorkerError, match="ValueError: column 3 is missing"):
        prepare(replace(spec, is_private=False))


@pytest.mark.parametrize("end", ["return raw, np.arange(5)", "raise ValueError(SECRET)", "os._exit(3)"])
def test_its_output_does_not_leave_the_worker(spec: PrepareSpec, end: str) -> None:
    loud = (
        f"import os, sys, warnings; SECRET = '{SECRET}'; print(SECRET); print(SECRET, file=sys.stderr); "
        "os.write(1, SECRET.encode()); os.write(2, SECRET.encode()); os.system('ls ' + path); "
        "warnings.warn(SECRET); "
    )
    write(spec, loud + READ + end)
    done = subprocess.run(
        [sys.executable, "-m", "csdctl.worker", "prepare"],
        input=to_json(spec) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert SECRET not in done.stdout + done.stderr
    kinds = {line.split()[0] for line in done.stdout.splitlines()}
    assert kinds <= {"@csdctl-progress", "@csdctl-result", "@csdctl-error"}
    assert done.returncode == {"return": 0, "raise ": 2, "os._ex": 3}[end[:6]]
