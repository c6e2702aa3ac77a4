"""Training with a model cut between nodes and host, compared with whole models on all ranks."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.running import csdctl
from tests.emulated.test_features import weights_of, write
from tests.emulated.training import events_of, kill_rank, nothing_is_left, start_training, wait_for_epochs
from tests.patience import communicate

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_SAMPLES = 96
JOB = """\
model: model.py:build
data:
  public: {path: public.npz}
  private: {path: ~/private.npz, activations: may-leave}
  validation: {path: validation.npz}
recipe: {epochs: 2, learning_rate: 0.01, optimizer: adam, metrics: [accuracy]}
"""
MODEL = """\
import keras
from keras import layers


def build():
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, activation="relu")(inputs)
    x = layers.BatchNormalization(name="cut")(x)
    x = layers.Conv2D(8, 3, activation="relu")(x)
    x = layers.BatchNormalization()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(x))
"""
RUN = ("--batch-size", "8", "--skip-doctor", "--no-rebalance")
SPLIT = ("--strategy", "split", "--cut", "cut")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("split")
    assert csdctl(directory, "emulate", "up", "--nodes", "2", "--cpu", "1").returncode == 0
    (directory / "job.yaml").write_text(JOB)
    (directory / "long.yaml").write_text(JOB.replace("epochs: 2", "epochs: 100000"))
    (directory / "closed.yaml").write_text(JOB.replace(", activations: may-leave", ""))
    (directory / "model.py").write_text(MODEL)
    nodes = directory / ".csdctl" / "emulated" / "nodes"
    places = (directory / "public", directory / "validation")
    for number, path in enumerate((*places, *(nodes / f"csd{n}" / "home" / "private" for n in range(2)))):
        write(path.with_suffix(".npz"), number)
    yield directory
    csdctl(directory, "emulate", "down")


def test_split_model_trains_as_whole_ones_and_says_what_left_the_nodes(project: Path) -> None:
    reports = []
    for strategy in ((), (*SPLIT, "--micro-batches", "1")):
        done = csdctl(project, "train", *RUN, *strategy, "--json")
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout.splitlines()[-1]))
    whole, split = reports
    assert split["samples"] == whole["samples"] == 2 * 3 * NUM_SAMPLES
    for one, other in zip(weights_of(project, whole), weights_of(project, split), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    report = csdctl(project, "report", "--privacy", "--json")
    assert report.returncode == 0, report.stderr
    document = json.loads(report.stdout)
    sent = document["of_run"]
    flows = {(flow["sender"], flow["receiver"], flow["kind"]): flow["num_bytes"] for flow in sent}
    # 8 × 10 × 10 activations in float32 and a label of 4 bytes for each of a node's samples, twice.
    assert flows["csd0", "host", "activations"] == 2 * NUM_SAMPLES * (8 * 10 * 10 * 4 + 4)


def test_verify_compares_the_split_model_with_the_whole_one(project: Path) -> None:
    verified = csdctl(project, "verify", *SPLIT, "--json")
    assert verified.returncode == 0, verified.stderr
    found = json.loads(verified.stdout)
    assert found["by_parts"] <= 1e-5


@pytest.mark.parametrize(
    ("arguments", "reason", "remedy"),
    [
        (
            ("closed.yaml", *SPLIT),
            "sends activations and labels of private samples",
            "activations: may-leave",
        ),
        (
            ("--strategy", "split", "--cut", "nowhere"),
            "cannot be cut behind 'nowhere'; its cuts: conv2d, cut",
            "--cut",
        ),
        (("--strategy", "split"), "has to be cut somewhere; its cuts: conv2d, cut, ", "--cut LAYER"),
        (("--cut", "cut"), "--strategy auto does not", "add --strategy split"),
    ],
)
def test_what_cannot_be_split_is_refused(
    project: Path, arguments: tuple[str, ...], reason: str, remedy: str
) -> None:
    done = csdctl(project, "train", *RUN, *arguments)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, done.stderr
    assert reason in said
    assert remedy in said
    assert "Traceback" not in said


def test_split_run_survives_a_lost_node_and_resumes(project: Path) -> None:
    process, run = start_training(project, "long.yaml", *SPLIT, "--max-steps", "1000000", until="EpochEnd")
    kill_rank("csd1")(project, run)
    wait_for_epochs(process, run, 2, 4)
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process, project)
    assert "csd1 is lost" in output
    assert nothing_is_left(project, run)
    steps = max(event["step"] for event in events_of(run, "CheckpointSaved"))
    resumed = csdctl(
        project, "train", "long.yaml", "--resume", run.name, "--skip-doctor", "--max-steps", str(steps + 20)
    )
    assert resumed.returncode == 0, resumed.stderr
