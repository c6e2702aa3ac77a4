"""`csdctl init`: what it writes is prepared and trained as it is, on an emulated host and node."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from csdctl.job.model import load_job
from tests.emulated.running import csdctl, document, emulated, home_of, succeed

pytestmark = pytest.mark.emulated

LAYERS = """\
import keras


class Scale(keras.layers.Layer):
    def __init__(self, by=2.0, **more):
        super().__init__(**more)
        self.by = by

    def call(self, x):
        return x * self.by

    def get_config(self):
        return {**super().get_config(), "by": self.by}
"""
MODELS = """\
import keras
from keras import layers
from own_layers import Scale


def build():
    model = keras.Sequential([
        keras.Input((8, 8, 3)), layers.Rescaling(1 / 255), layers.Conv2D(4, 3), Scale(2.0),
        layers.GlobalAveragePooling2D(), layers.Dense(3, activation="softmax"),
    ])
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def narrow():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4)])
"""


def write_bmp(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = bytes([grey] * 3 * 8) * 8
    numbers = [(54 + len(rows), 4), (0, 4), (54, 4), (40, 4), (8, 4), (8, 4), (1, 2), (24, 2)]
    header = b"BM" + b"".join(value.to_bytes(length, "little") for value, length in numbers)
    path.write_bytes(header.ljust(54, b"\0") + rows)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's directory, without a fleet."""
    directory = tmp_path_factory.mktemp("init")
    (directory / "own_layers.py").write_text(LAYERS)
    (directory / "models.py").write_text(MODELS)
    x = np.random.default_rng(0).random((96, 8), np.float32)
    np.savez(directory / "train.npz", x=x, y=x[:, :4].argmax(1))
    return directory


@pytest.fixture(scope="module")
def project(directory: Path) -> Iterator[Path]:
    with emulated(directory, 1):
        for part, number in (("pictures/train", 30), ("pictures/val", 6)):
            for label, name in enumerate(("black", "grey", "white")):
                for index in range(number):
                    write_bmp(directory / part / name / f"{index}.bmp", 100 * label + index)
        private = home_of(directory, "csd0") / "private"
        shutil.copytree(directory / "pictures/val", private, dirs_exist_ok=True)
        yield directory


@pytest.mark.thorough
def test_compiled_model_with_own_layers_and_class_folders_is_trained_as_it_was_written(project: Path) -> None:
    options = ("--public", "pictures/train", "--validation", "pictures/val", "--private", "~/private")
    found = document(project, "init", "--output", "cnn.yaml", "--model", "models.py:build", *options)
    assert (found["fits"], found["path"]) == (True, "cnn.yaml")
    commands = [f"csdctl {command} cnn.yaml" for command in ("prepare", "tune", "train")]
    assert found["next"] == ["csdctl doctor", *commands]
    assert found["model"]["compiled"]["learning_rate"] == 0.003
    assert found["public"]["class_counts"] == {"black": 30, "grey": 30, "white": 30}
    job = load_job(project / "cnn.yaml")
    assert job.code == (project / "own_layers.py",)
    assert (job.recipe.input_range, job.recipe.learning_rate, job.private_path) == (None, None, "~/private")
    succeed(project, "prepare", "cnn.yaml")
    report = document(project, "train", "cnn.yaml", "--batch-size", "8", "--max-steps", "3", "--skip-doctor")
    assert report["steps"] == 3


def test_what_does_not_fit_is_written_with_the_reason(directory: Path) -> None:
    options = ("--model", "models.py:narrow", "--public", "train.npz", "--output", "narrow.yaml")
    done = csdctl(directory, "init", "--json", *options)
    assert done.returncode == 2
    problem = json.loads(done.stdout)["problem"]["message"]
    assert "takes samples of shape 5, the public data has 8" in problem
    assert f"error: {problem}" in done.stderr
    assert f"# THIS DOES NOT FIT YET: {problem[:40]}" in (directory / "narrow.yaml").read_text()
    assert load_job(directory / "narrow.yaml").recipe.epochs == 10


def test_nothing_is_overwritten_without_force(directory: Path) -> None:
    (directory / "job.yaml").write_text("mine")
    done = csdctl(directory, "init", "--model", "models.py:build", "--public", "train.npz")
    assert (done.returncode, (directory / "job.yaml").read_text()) == (2, "mine")
    assert "job.yaml already exists" in done.stderr
    assert "--force" in done.stderr
