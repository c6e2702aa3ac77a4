"""The lab for a session of tests, a project for each test, and a loud word when there is no lab."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.lab.lab import Lab, open_lab
from tests.lab.project import Project
from tests.lab.requirements import LAB_DID_NOT_RUN, SYSTEM_PATH, find_missing_packages, why_not_here

QUIET_DEADLINE_S = 15.0

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
    """The lab, up; its standing nodes are as they were when a test ends."""
    if reason := why_not_here():
        pytest.skip(f"{LAB_DID_NOT_RUN}: {reason}")
    if packages := find_missing_packages():
        pytest.fail(f"the lab lacks programs: apt-get install {' '.join(packages)}", pytrace=False)
    os.environ["PATH"] = f"{os.environ['PATH']}:{SYSTEM_PATH}"
    with open_lab() as opened:
        yield opened


@pytest.fixture
def project(lab: Lab, tmp_path: Path) -> Iterator[Project]:
    """An empty project. When the test ends, nothing of csdctl may run on any machine of the lab."""
    yield Project(lab, tmp_path)
    still = _wait_until_quiet(lab)
    for node in lab.nodes.values():
        shutil.rmtree(node.home / ".csdctl", ignore_errors=True)
    assert still == {}


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file: a model of a few hundred parameters, and 96 public pictures."""
    directory = tmp_path_factory.mktemp("job")
    images = np.random.default_rng(7).integers(0, 256, (96, 8, 8, 1), dtype=np.uint8)
    (directory / "public").mkdir()
    np.save(directory / "public" / "images.npy", images)
    np.save(directory / "public" / "labels.npy", (images.mean((1, 2, 3)) > 127).astype(np.int64))
    (directory / "small.py").write_text(MODEL)
    (directory / "job.yaml").write_text(JOB)
    return directory / "job.yaml"


def _wait_until_quiet(lab: Lab) -> dict[str, list[str]]:
    """What still runs on the nodes after a while; a killed command may take a moment to end."""
    deadline = time.monotonic() + QUIET_DEADLINE_S
    while True:
        still = {node.name: commands for node in lab.nodes.values() if (commands := node.commands())}
        if not still or time.monotonic() > deadline:
            return still
        time.sleep(0.05)
