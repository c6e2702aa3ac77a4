"""Noise on private samples, trained over SSH and MPI on an emulated host and two nodes."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from csdctl.reporting.privacy import compute_epsilon
from csdctl.worker.protocol.recipe import Noise
from tests.emulated.running import document, emulated, home_of, refuse, succeed
from tests.emulated.small_jobs import save_arrays

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


def build():
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.LayerNormalization()]
    return keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
"""
TRAIN = ("train", "--batch-size", "4", "--skip-doctor", "--no-rebalance", "--json")
NUM_PRIVATE = {"csd0": 12, "csd1": 5}
PASSES = {"csd0": 1, "csd1": 3}
"""csd1 repeats its 5 samples to get 12."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("noise"), 2, {"model.py": MODEL, "job.yaml": JOB}) as directory:
        save_arrays(directory / "public", 21, 8, 8, 1)
        for node, count in NUM_PRIVATE.items():
            save_arrays(home_of(directory, node) / "private", count, 8, 8, 1)
        yield directory


def test_resumed_run_with_noise_reports_its_guarantee(project: Path) -> None:
    """A resumed run adds to what was released before, and keeps its noise."""
    stopped = succeed(project, *TRAIN, "--max-steps", "2")
    assert "after 2 epochs, if nothing is lost, private samples of csd0: ε = " in stopped.stderr
    (project / "job.yaml").write_text(JOB.replace("12.0", "13.0"))
    refusal = refuse(project, "train", "--resume", "latest", "--skip-doctor")
    (project / "job.yaml").write_text(JOB)
    assert "data.private.noise" in refusal
    done = succeed(project, "train", "--resume", "latest", "--skip-doctor", "--json")
    assert "released: private samples of csd1: ε = " in done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    report = lines[-1]
    assert report["state"] == "completed"
    assert report["identical_weights"]
    of_host = [line for line in lines if line.get("event") == "EpochEnd" and line["rank"] == 0]
    assert of_host
    assert all(np.isfinite(line["loss"]) for line in of_host)
    privacy = document(project, "report", "--privacy")["privacy"]
    assert privacy == report["privacy"]
    noise, num_epochs = Noise(1.0, 12.0, 1e-5), 3  # the first is begun twice
    epsilons = {node: compute_epsilon(noise, num_epochs * PASSES[node]) for node in NUM_PRIVATE}
    assert privacy["nodes"] == [
        {
            "node": node,
            "num_private": count,
            "num_releases": num_epochs * PASSES[node],
            "epsilon": epsilons[node],
        }
        for node, count in NUM_PRIVATE.items()
    ]
    for arguments in (("report", "--privacy"), ("report",)):
        printed = " ".join(succeed(project, *arguments).stdout.split())
        assert f"{epsilons['csd1']:.3g} at δ = 1e-05" in printed


def test_tuning_measures_private_nodes_with_noise_and_verify_reports_no_noise(project: Path) -> None:
    succeed(project, "tune", "--exclude", "csd1", "--probe-seconds", "0.1")
    verified = succeed(project, "verify", "--exclude", "csd1")
    assert "without clipping and noise" in verified.stderr + verified.stdout
