"""One job by each strategy, on an emulated host and a node: the same samples, the same model at the end."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulated.running import csdctl
from tests.patience import run_command

pytestmark = pytest.mark.emulated

NUM_SAMPLES = 96
PLACES = ("public", "validation", ".csdctl/emulated/nodes/csd0/home/private")
STRATEGIES = {
    "data-parallel": (),
    "features": ("--strategy", "features"),
    "split": ("--strategy", "split", "--cut", "cut"),
}
JOB = """\
model: model.py:build
data:
  public: {path: public.npz}
  private: {path: ~/private.npz, activations: may-leave}
  validation: {path: validation.npz}
recipe: {epochs: 2, learning_rate: 0.01, optimizer: adam}
"""
MODEL = """\
import keras
from keras import layers


def build():
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, activation="relu", trainable=False)(inputs)
    x = layers.BatchNormalization(trainable=False, name="cut")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(x))
"""
READ_WEIGHTS = """\
import sys, keras, numpy as np
for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
    np.savez(name, *keras.models.load_model(path).get_weights())
"""


def write_samples(path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, NUM_SAMPLES)
    pictures = generator.integers(0, 120, (NUM_SAMPLES, 12, 12, 3)) + 40 * labels[:, None, None, None]
    np.savez(path, x=pictures.astype(np.uint8), y=labels)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("strategies")
    assert csdctl(directory, "emulate", "up", "--nodes", "1", "--cpu", "1").returncode == 0
    (directory / "job.yaml").write_text(JOB)
    (directory / "closed.yaml").write_text(JOB.replace(", activations: may-leave", ""))
    (directory / "model.py").write_text(MODEL)
    for seed, place in enumerate(PLACES):
        write_samples((directory / place).with_suffix(".npz"), seed)
    yield directory
    csdctl(directory, "emulate", "down")


@pytest.fixture(scope="module")
def reports(project: Path) -> dict[str, dict[str, Any]]:
    """The report of a training by each strategy."""
    found = {}
    for strategy, options in STRATEGIES.items():
        done = csdctl(
            project, "train", *options, "--batch-size", "8", "--skip-doctor", "--no-rebalance", "--json"
        )
        assert done.returncode == 0, f"{strategy}: {done.stderr}"
        found[strategy] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def weights(project: Path, reports: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """The weights of each trained model, as Keras reads them from its file."""
    words = [word for name, report in reports.items() for word in (name, f"{report['path']}/model.keras")]
    done = run_command([sys.executable, "-c", READ_WEIGHTS, *words], cwd=project)
    assert done.returncode == 0, done.stderr
    found = {}
    for strategy in STRATEGIES:
        with np.load(project / f"{strategy}.npz") as arrays:
            found[strategy] = [arrays[name] for name in arrays.files]
    return found


@pytest.mark.parametrize("strategy", ["features", "split"])
def test_every_strategy_trains_the_same_model(
    reports: dict[str, dict[str, Any]], weights: dict[str, list[Any]], strategy: str
) -> None:
    expected = reports["data-parallel"]
    assert reports[strategy]["samples"] == expected["samples"] == 2 * 2 * NUM_SAMPLES
    assert reports[strategy]["validation_accuracy"] == pytest.approx(
        expected["validation_accuracy"], abs=0.02
    )
    assert len(weights[strategy]) == len(weights["data-parallel"]) == 8
    for one, other in zip(weights["data-parallel"], weights[strategy], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_features_are_computed_once_for_every_sample(
    project: Path, reports: dict[str, dict[str, Any]]
) -> None:
    manifest = json.loads(Path(project, reports["features"]["path"], "manifest.json").read_text())
    assert manifest["features"]["num_computed"] == 3 * NUM_SAMPLES


def test_split_sends_activations_and_labels_and_says_so(
    project: Path, reports: dict[str, dict[str, Any]]
) -> None:
    report = csdctl(project, "report", reports["split"]["run_id"], "--privacy", "--json")
    assert report.returncode == 0, report.stderr
    document = json.loads(report.stdout)
    flows = {(one["sender"], one["receiver"], one["kind"]): one["num_bytes"] for one in document["of_run"]}
    # 8 × 10 × 10 activations in float32 and a label of 4 bytes for each of the node's samples, twice.
    assert flows["csd0", "host", "activations"] == 2 * NUM_SAMPLES * (8 * 100 * 4 + 4)


def test_split_over_private_data_is_refused_unless_the_job_says_that_activations_may_leave(
    project: Path,
) -> None:
    done = csdctl(project, "train", "closed.yaml", *STRATEGIES["split"], "--batch-size", "8", "--skip-doctor")
    assert done.returncode == 2, done.stderr
    assert "add `activations: may-leave`" in " ".join(done.stderr.split())


def test_features_of_private_samples_stay_on_their_node(
    project: Path, reports: dict[str, dict[str, Any]]
) -> None:
    report = csdctl(project, "report", reports["features"]["run_id"], "--privacy", "--json")
    kinds = {one["kind"] for one in json.loads(report.stdout)["of_run"] if one["sender"] == "csd0"}
    assert not [kind for kind in kinds if "features" in kind]
    assert {one["kind"] for one in json.loads(report.stdout)["of_run"]}
