"""The lab for a test session, and a project for each test."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.lab.lab import Lab, open_lab
from tests.lab.project import Project
from tests.needs import SYSTEM_PATH, require
from tests.patience import eventually

MODEL = """\
import keras


def build():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(2, activation="softmax")]
    )
"""
JOB = """\
model: small.py:build
data: {public: {path: public}}
recipe: {epochs: 2, learning_rate: 0.01, reference_batch: 16}
"""


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The running lab; tests leave its permanent nodes unchanged."""
    require("lab")
    os.environ["PATH"] = f"{os.environ['PATH']}:{SYSTEM_PATH}"
    with open_lab() as opened:
        yield opened


@pytest.fixture
def project(lab: Lab, tmp_path: Path) -> Iterator[Project]:
    """An empty project. After the test, no process of csdctl may run on any machine of the lab."""
    yield Project(lab, tmp_path)
    running = _wait_until_quiet(lab)
    for node in lab.nodes.values():
        shutil.rmtree(node.home / ".csdctl", ignore_errors=True)
    assert running == {}


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file: a model of a few hundred parameters, and 96 public images."""
    directory = tmp_path_factory.mktemp("job")
    images = np.random.default_rng(7).integers(0, 256, (96, 8, 8, 1), dtype=np.uint8)
    (directory / "public").mkdir()
    np.save(directory / "public" / "images.npy", images)
    np.save(directory / "public" / "labels.npy", (images.mean((1, 2, 3)) > 127).astype(np.int64))
    (directory / "small.py").write_text(MODEL)
    (directory / "job.yaml").write_text(JOB)
    return directory / "job.yaml"


def _wait_until_quiet(lab: Lab) -> dict[str, list[str]]:
    """Return what still runs on the nodes; a killed command may take a moment to end."""

    def find() -> dict[str, list[str]]:
        return {node.name: commands for node in lab.nodes.values() if (commands := node.commands())}

    return {} if eventually(lambda: not find()) else find()
