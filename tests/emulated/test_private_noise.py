"""Noise on private samples, trained over SSH and MPI on an emulated host and two nodes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from csdctl.reporting.privacy import compute_epsilon
from csdctl.worker.protocol.recipe import Noise
from tests.emulated.running import csdctl

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

JOB = """\
model: model.py:build
data:
  public: {path: public}
  private:
    path: ~/private
    unequal: repeat
    noise: {l2_norm_clip: 1.0, noise_multiplier: 12.0, delta: 1.0e-5}
recipe: {epochs: 2, learning_rate: 0.05}
"""
MODEL = """\
import keras


def build(norm="LayerNormalization"):
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), getattr(keras.layers, norm)()]
    return keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
"""
TRAIN = ("train", "--batch-size", "4", "--skip-doctor", "--no-rebalance", "--json")
NUM_PRIVATE = {"csd0": 12, "csd1": 5}
PASSES = {"csd0": 1, "csd1": 3}
"""csd1 repeats its 5 samples to get 12."""
PREDICTED = "after 2 epochs, if nothing is lost, private samples of csd0: ε = "


def save_samples(directory: Path, count: int) -> None:
    generator = np.random.default_rng(count)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    np.save(directory / "images.npy", generator.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8))
    np.save(directory / "labels.npy", (np.arange(count) % 3).astype(np.int32))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("noise")
    assert csdctl(directory, "emulate", "up", "--nodes", "2", "--cpu", "1").returncode == 0
    (directory / "model.py").write_text(MODEL)
    (directory / "job.yaml").write_text(JOB)
    save_samples(directory / "public", 21)
    for node, count in NUM_PRIVATE.items():
        save_samples(directory / ".csdctl/emulated/nodes" / node / "home/private", count)
    yield directory
    csdctl(directory, "emulate", "down")


@pytest.mark.parametrize(
    "is_resumed",
    [pytest.param(True, id="resumed"), pytest.param(False, id="undisturbed", marks=pytest.mark.thorough)],
)
def test_run_with_noise_reports_its_guarantee(project: Path, *, is_resumed: bool) -> None:
    """A resumed run adds to what was released before, and keeps its noise."""
    if is_resumed:
        stopped = csdctl(project, *TRAIN, "--max-steps", "2")
        assert stopped.returncode == 0, stopped.stderr
        assert PREDICTED in stopped.stderr
        (project / "job.yaml").write_text(JOB.replace("12.0", "13.0"))
        other = csdctl(project, "train", "--resume", "latest", "--skip-doctor")
        (project / "job.yaml").write_text(JOB)
        assert other.returncode == 2
        assert "data.private.noise" in other.stderr
        done = csdctl(project, "train", "--resume", "latest", "--skip-doctor", "--json")
        num_epochs = 3  # the first is begun twice
    else:
        done = csdctl(project, *TRAIN)
        assert PREDICTED in done.stderr
        num_epochs = 2
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    report = lines[-1]
    assert report["state"] == "done"
    assert report["identical_weights"]
    of_host = [line for line in lines if line.get("event") == "EpochEnd" and line["rank"] == 0]
    assert of_host
    assert all(np.isfinite(line["loss"]) for line in of_host)
    assert "released: private samples of csd1: ε = " in done.stderr
    shown_report = csdctl(project, "report", "--privacy", "--json")
    assert shown_report.returncode == 0, shown_report.stderr
    privacy = json.loads(shown_report.stdout)["privacy"]
    assert privacy == report["privacy"]
    noise = Noise(1.0, 12.0, 1e-5)
    assert privacy["nodes"] == [
        {
            "node": node,
            "num_private": count,
            "num_releases": num_epochs * PASSES[node],
            "epsilon": compute_epsilon(noise, num_epochs * PASSES[node]),
        }
        for node, count in NUM_PRIVATE.items()
    ]
    for arguments in (("report", "--privacy"), ("report",)):
        shown = " ".join(csdctl(project, *arguments).stdout.split())
        assert f"{compute_epsilon(noise, num_epochs * PASSES['csd1']):.3g} at δ = 1e-05" in shown


def test_model_with_sample_statistics_is_refused_before_training(project: Path) -> None:
    (project / "job.yaml").write_text("model_args: {norm: BatchNormalization}\n" + JOB)
    refused = csdctl(project, *TRAIN)
    (project / "job.yaml").write_text(JOB)
    assert refused.returncode == 2
    assert "stores statistics of its samples, which data.private.noise does not cover" in refused.stderr
    assert "(BatchNormalization)" in refused.stderr


def test_tuning_measures_private_nodes_with_noise_and_verify_reports_no_noise(project: Path) -> None:
    tuned = csdctl(project, "tune", "--exclude", "csd1", "--no-explore", "--probe-seconds", "0.1")
    assert tuned.returncode == 0, tuned.stderr
    verified = csdctl(project, "verify", "--exclude", "csd1")
    assert verified.returncode == 0, verified.stderr
    assert "without clipping and noise" in verified.stderr + verified.stdout
