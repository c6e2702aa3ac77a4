"""User models: the files transferred to the nodes, and models that are refused."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csdctl.worker.compute.model import build
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.json_codec import ANSWER_PREFIX, WORKER_ERROR_PREFIX, from_json, to_json
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.recipe import Recipe
from tests.unit.worker.compute.built_models import keras

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras

FUNCTION = """
import keras
from keras import layers


def with_lambda():
    return keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2), layers.Dense(3)])


def own_layer():
    class Mine(layers.Layer):
        def call(self, x):
            return x

    return keras.Sequential([keras.Input((4,)), Mine(), layers.Dense(3)])


def any_size():
    middle = [layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((None, None, 3)), *middle, layers.Dense(3)])


def with_an_end():
    import atexit, pathlib
    atexit.register(lambda: pathlib.Path(__file__).with_name("at-the-end").touch())
    return fine()


def fine():
    return keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(3, activation="softmax")])
"""
QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def restored_path() -> Iterator[None]:
    """Undo the change to sys.path: the directory of user code is added to it."""
    before = sys.path.copy()
    yield
    sys.path[:] = before


def refusal(directory: Path, reference: str, **recipe: Any) -> str:
    """Return the message of the error, exit code 2, with which the model is refused."""
    with pytest.raises(WorkerError) as caught:
        build(reference, {}, Recipe(**recipe), directory, keras())
    assert caught.value.exit_code == 2
    return caught.value.message


def build_in_a_worker(directory: Path, reference: str) -> tuple[ModelInfo | None, str]:
    """Run the worker's `build`; return the model's properties, or None and the error message."""
    output = directory / "output"
    output.mkdir(exist_ok=True)
    arguments = ["--reference", reference, "--recipe", to_json(Recipe()), "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "csdctl.worker", "build", *arguments],
        capture_output=True,
        text=True,
        env=QUIET,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER_PREFIX):
            return from_json(ModelInfo, line.removeprefix(ANSWER_PREFIX)), ""
    lines = [line for line in done.stderr.splitlines() if line.startswith(WORKER_ERROR_PREFIX)]
    assert lines, done.stderr
    assert done.returncode == 2
    return None, str(json.loads(lines[-1].removeprefix(WORKER_ERROR_PREFIX))["message"])


def save_keras_file(path: Path, middle: Any) -> str:
    layers = keras().layers
    keras().Sequential([keras().Input((4, 4, 1)), middle, layers.Flatten(), layers.Dense(3)]).save(path)
    return str(path)


def test_keras_file_is_transferred_as_architecture_and_weights(tmp_path: Path) -> None:
    file = save_keras_file(tmp_path / "model.keras", keras().layers.Rescaling(2.0))
    info, _ = build_in_a_worker(tmp_path, file)
    assert info
    assert (info.input_shape, info.output_shape) == ((4, 4, 1), (3,))
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == [
        "architecture.json",
        "weights.npz",
    ]


@pytest.mark.fault(42)
def test_keras_file_with_code_in_it_is_refused(tmp_path: Path) -> None:
    file = save_keras_file(tmp_path / "model.keras", keras().layers.Lambda(lambda x: x * 2))
    info, why = build_in_a_worker(tmp_path, file)
    assert info is None
    assert "not a model that can be loaded safely" in why


def test_atexit_handlers_of_user_code_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    assert build_in_a_worker(tmp_path, f"{tmp_path}/mine.py:with_an_end")[0]
    assert (tmp_path / "at-the-end").exists()


@pytest.mark.fault(42)
def test_pickle_under_the_name_of_a_keras_file_is_refused_and_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/was-run",)

    (tmp_path / "model.keras").write_bytes(pickle.dumps(Runs()))
    why = refusal(tmp_path, str(tmp_path / "model.keras"))
    assert "not a model that can be loaded safely" in why
    assert not (tmp_path / "was-run").exists()


@pytest.mark.fault(42)
@pytest.mark.parametrize("function", ["with_lambda", "own_layer"])
def test_layer_that_only_the_users_code_knows_is_refused(tmp_path: Path, function: str) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    assert "cannot be transferred" in refusal(tmp_path, f"{tmp_path}/mine.py:{function}")


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (("AUC",), "not a mean over samples"),
        (("nonsense",), "cannot be used"),
        (("Precision",), "not a mean over samples"),
    ],
)
def test_metric_that_is_not_a_mean_is_refused(tmp_path: Path, metrics: tuple[str, ...], why: str) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    assert why in refusal(tmp_path, f"{tmp_path}/mine.py:fine", metrics=metrics)


def test_metrics_are_accepted_by_either_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    metrics = ("accuracy", "sparse_top_k_categorical_accuracy", "SparseCategoricalCrossentropy")
    assert build(f"{tmp_path}/mine.py:fine", {}, Recipe(metrics=metrics), tmp_path, keras()).output_shape == (
        3,
    )


@pytest.mark.parametrize(("reference", "num_operations"), [("fine", 2 * 4 * 3), ("any_size", 0)])
def test_built_model_has_its_flops(tmp_path: Path, reference: str, num_operations: int) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    info = build(f"{tmp_path}/mine.py:{reference}", {}, Recipe(), tmp_path, keras())
    assert info.num_operations == num_operations
