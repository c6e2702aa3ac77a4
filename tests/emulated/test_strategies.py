"""One job by each strategy, on an emulated fleet: the same samples, the same model at the end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulated.running import document, emulated, succeed
from tests.emulated.small_jobs import ALL_DATA, small_job
from tests.emulated.test_features import NUM_SAMPLES, weights_of, write_all
from tests.emulated.training import events_of, stop_without_csd1

pytestmark = pytest.mark.emulated

STRATEGIES = {
    "data-parallel": (),
    "features": ("--strategy", "features"),
    "split": ("--strategy", "split", "--cut", "cut"),
}
RUN = ("--batch-size", "8", "--skip-doctor", "--no-rebalance")
ALONE = ("--exclude", "csd1")
JOB = small_job("epochs: 2, learning_rate: 0.01, optimizer: adam", ".npz", data=ALL_DATA).replace(
    "private.npz", "private.npz, activations: may-leave"
)
MODEL = """\
import keras
from keras import layers


def build(trainable=False):
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, activation="relu", trainable=trainable)(inputs)
    x = layers.BatchNormalization(trainable=trainable, name="cut")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(x))


def build_trained():
    return build(trainable=True)
"""
ACTIVATION_BYTES = 2 * NUM_SAMPLES * (8 * 100 * 4 + 4)
"""Bytes of a node in two epochs: 8 × 10 × 10 activations in float32 and a label for each sample."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    files = {"job.yaml": JOB, "model.py": MODEL}
    files["trained.yaml"] = JOB.replace(":build", ":build_trained")
    files["long.yaml"] = files["trained.yaml"].replace("epochs: 2", "epochs: 100000")
    with emulated(tmp_path_factory.mktemp("strategies"), 2, files) as directory:
        write_all(directory)
        yield directory


@pytest.fixture(scope="module")
def reports(project: Path) -> dict[str, dict[str, Any]]:
    """The report of a training by each strategy."""
    return {name: document(project, "train", *options, *RUN, *ALONE) for name, options in STRATEGIES.items()}


def sent_in(project: Path, report: dict[str, Any]) -> dict[tuple[str, str, str], int]:
    """Return the bytes that a run sent, by sender, receiver and kind."""
    flows = document(project, "report", report["run_id"], "--privacy")["of_run"]
    return {(flow["sender"], flow["receiver"], flow["kind"]): flow["num_bytes"] for flow in flows}


def test_every_strategy_trains_the_same_model(project: Path, reports: dict[str, dict[str, Any]]) -> None:
    expected, *compared = weights_of(project, *reports.values())
    for report in reports.values():
        assert report["samples"] == 2 * 2 * NUM_SAMPLES
        accuracy = reports["data-parallel"]["validation_accuracy"]
        assert report["validation_accuracy"] == pytest.approx(accuracy, abs=0.02)
    for weights in compared:
        assert len(weights) == len(expected) == 8
        for expected_array, array in zip(expected, weights, strict=True):
            np.testing.assert_allclose(expected_array, array, rtol=1e-3, atol=1e-5)


def test_features_of_private_samples_stay_and_activations_are_counted(
    project: Path, reports: dict[str, dict[str, Any]]
) -> None:
    features = sent_in(project, reports["features"])
    assert features
    assert not [kind for sender, _, kind in features if sender == "csd0" and "features" in kind]
    manifest = json.loads(Path(project, reports["features"]["path"], "manifest.json").read_text())
    assert manifest["features"]["num_computed"] == 3 * NUM_SAMPLES
    assert sent_in(project, reports["split"])["csd0", "host", "activations"] == ACTIVATION_BYTES


@pytest.mark.thorough
def test_layers_before_the_cut_are_trained_as_in_whole_models(project: Path) -> None:
    undivided = document(project, "train", "trained.yaml", *RUN)
    split = document(project, "train", "trained.yaml", *RUN, *STRATEGIES["split"], "--micro-batches", "1")
    assert split["samples"] == undivided["samples"] == 2 * 3 * NUM_SAMPLES
    for expected, array in zip(*weights_of(project, undivided, split), strict=True):
        np.testing.assert_allclose(expected, array, rtol=1e-3, atol=1e-4)
    assert sent_in(project, split)["csd1", "host", "activations"] == ACTIVATION_BYTES
    verified = document(project, "verify", "trained.yaml", *STRATEGIES["split"])
    assert all(rank["difference"] <= 1e-5 for rank in verified["ranks"].values())


@pytest.mark.thorough
def test_split_run_survives_a_lost_node_and_resumes(project: Path) -> None:
    run = stop_without_csd1(project, "long.yaml", *STRATEGIES["split"])
    steps = max(event["step"] for event in events_of(run, "CheckpointSaved"))
    succeed(
        *(project, "train", "long.yaml", "--resume", run.name, "--skip-doctor"),
        *("--max-steps", str(steps + 20)),
    )
