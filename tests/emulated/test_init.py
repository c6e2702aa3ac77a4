"""`csdctl init`: what it writes is prepared and trained as it is, on an emulated host and node."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.job.model import load_job
from tests.emulated.running import document, emulated, home_of, succeed

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

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
"""


def write_bmp(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = bytes([grey] * 3 * 8) * 8
    numbers = [(54 + len(rows), 4), (0, 4), (54, 4), (40, 4), (8, 4), (8, 4), (1, 2), (24, 2)]
    header = b"BM" + b"".join(value.to_bytes(length, "little") for value, length in numbers)
    path.write_bytes(header.ljust(54, b"\0") + rows)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    with emulated(tmp_path, 1, {"own_layers.py": LAYERS, "models.py": MODELS}):
        for part, number in (("pictures/train", 30), ("pictures/val", 6)):
            for label, name in enumerate(("black", "grey", "white")):
                for index in range(number):
                    write_bmp(tmp_path / part / name / f"{index}.bmp", 100 * label + index)
        private = home_of(tmp_path, "csd0") / "private"
        shutil.copytree(tmp_path / "pictures/val", private, dirs_exist_ok=True)
        yield tmp_path


def test_compiled_model_with_own_layers_and_class_folders_is_trained_as_it_was_written(project: Path) -> None:
    options = ("--public", "pictures/train", "--validation", "pictures/val", "--private", "~/private")
    described = document(project, "init", "--output", "cnn.yaml", "--model", "models.py:build", *options)
    assert (described["fits"], described["path"]) == (True, "cnn.yaml")
    commands = [f"csdctl {command} cnn.yaml" for command in ("prepare", "tune", "train")]
    assert described["next"] == ["csdctl doctor", *commands]
    assert described["model"]["compiled"]["learning_rate"] == 0.003
    assert described["public"]["class_counts"] == {"black": 30, "grey": 30, "white": 30}
    job = load_job(project / "cnn.yaml")
    assert job.code == (project / "own_layers.py",)
    assert (job.recipe.input_range, job.recipe.learning_rate, job.private_path) == (None, None, "~/private")
    succeed(project, "prepare", "cnn.yaml")
    report = document(project, "train", "cnn.yaml", "--batch-size", "8", "--max-steps", "3", "--skip-doctor")
    assert report["steps"] == 3
