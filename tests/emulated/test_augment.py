"""`data.augment` over SSH and MPI on an emulated host and two nodes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulated.running import document, emulated, home_of, refuse, succeed
from tests.emulated.small_jobs import save_arrays

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

JOB = """\
model: model.py:build
code: [turning.py]
data:
  public: {path: public}
  private: {path: ~/private}
  augment: augment.py:flip
recipe: {epochs: 2, learning_rate: 0.02, seed: 3}
"""
MODEL = """\
import keras


def build():
    layers = [keras.Input((32, 32, 3)), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
"""
AUGMENT = """\
import turning


def flip(samples, labels, rng):
    return turning.turn(samples, rng), labels


def fail_on_a_node(samples, labels, rng):
    import os
    if "CSDCTL_EMULATED_NODE" in os.environ:
        raise ValueError(f"secret {samples}")
    return samples, labels
"""
TURNING = """\
def turn(samples, rng):
    turned = rng.random(len(samples)) < 0.5
    samples[turned] = samples[turned, :, ::-1]
    return samples
"""
ALONE = ("--exclude", "csd1")
"""Options of runs in which a second node proves nothing more."""
TRAIN = ("train", "--batch-size", "8", "--skip-doctor", "--no-rebalance", "--json")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    files = {"job.yaml": JOB, "model.py": MODEL, "augment.py": AUGMENT, "turning.py": TURNING}
    with emulated(tmp_path_factory.mktemp("augment"), 2, files) as directory:
        save_arrays(directory / "public", 40, 32, 32, 3)
        for number, node in enumerate(("csd0", "csd1")):
            save_arrays(home_of(directory, node) / "private", 12 + number, 32, 32, 3)
        yield directory


def train(project: Path) -> tuple[list[float], dict[str, Any]]:
    """Return the loss of each epoch, and the report at the end."""
    lines = [json.loads(line) for line in succeed(project, *TRAIN, *ALONE).stdout.splitlines()]
    ends = [line for line in lines if line.get("event") == "EpochEnd" and line["rank"] == 0]
    return [end["loss"] for end in ends], lines[-1]


def test_function_is_tried_once_and_sent_without_the_model(project: Path) -> None:
    done = succeed(project, "prepare")
    assert "code for the nodes: augment.py, turning.py (2 files, " in done.stdout
    assert "augment.py:flip, tried on public samples" in done.stdout
    assert "tried on" not in succeed(project, "prepare").stdout


def test_run_repeats_its_augmentation(project: Path) -> None:
    runs = [train(project) for _ in range(2)]
    assert all(report["identical_weights"] for _, report in runs)
    assert all(report["samples"] == 2 * (40 + 12) for _, report in runs)
    losses = [loss for loss, _ in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_verify_includes_the_augmentation_of_every_rank(project: Path) -> None:
    verified = document(project, "verify")
    assert verified["is_equal"]
    assert all(rank["difference"] <= 8 * rank["spread"] for rank in verified["ranks"].values())
    assert verified["not_one_batch"] == ["augmentation by augment.py:flip"]


def test_failure_on_a_node_is_named_and_its_message_stays_there(project: Path) -> None:
    (project / "fails.yaml").write_text(JOB.replace("py:flip", "py:fail_on_a_node"))
    said = refuse(project, *TRAIN, "fails.yaml", *ALONE)
    assert "csd0: augment.py:fail_on_a_node fails: ValueError" in said
    assert "secret" not in said
