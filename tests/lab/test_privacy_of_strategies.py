"""Traffic on the cables when a model is trained by features, or split, all of it captured.

The model's first layer returns its input. So what it computes from a private sample is known, in bytes.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.lab.capture import captured
from tests.lab.project import Project
from tests.lab.test_privacy import CANARY, NETWORK, TOLERANCE, check_ledger, find_canaries

pytestmark = [pytest.mark.lab, pytest.mark.thorough]

NUM_PRIVATE, EPOCHS, LABEL_BYTES = 500, 10, 4
IMAGE = np.frombuffer((CANARY * 3)[:64], np.uint8).reshape(8, 8, 1)
COMPUTED = {kind: IMAGE[2:4].astype(kind).tobytes() for kind in ("float32", "float16")}
"""Two rows of the first layer's output."""
MODEL = """\
import keras


def build():
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    first = layers.Conv2D(1, 1, kernel_initializer="ones", use_bias=False, trainable=False, name="first")
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(layers.Flatten()(first(inputs))))
"""
JOB = f"""\
model: same.py:build
data: {{public: {{path: public}}, private: {{path: private%s}}, input_range: null}}
recipe: {{epochs: {EPOCHS}, learning_rate: 0.000001}}
"""
RUN = ("--batch-size", "50", "--no-rebalance")
SPLIT = ("--strategy", "split", "--cut", "first")


@pytest.fixture
def private_job(project: Project, job: Path) -> Path:
    """A job whose private samples are canaries, on two nodes."""
    nodes = project.lab.near[:2]
    project.use(*nodes, network=NETWORK)
    for node in nodes:
        place = node.home / "private"
        shutil.rmtree(place, ignore_errors=True)  # of an earlier test: samples, or folders of pictures
        place.mkdir()
        np.savez(
            place / "samples.npz",
            x=np.repeat(IMAGE[np.newaxis], NUM_PRIVATE, axis=0),
            y=np.arange(NUM_PRIVATE) % 2,
        )
    job.with_name("same.py").write_text(MODEL)
    strategies = job.with_name("strategies.yaml")
    strategies.write_text(JOB % "")
    return strategies


def find_computed(content: bytes) -> bool:
    """Return whether `content` has two rows of what the first layer computes of a canary."""
    return any(pattern in content for pattern in COMPUTED.values())


def test_features_of_private_samples_stay_on_their_node(project: Project, private_job: Path) -> None:
    nodes = project.lab.near[:2]
    with captured(project.lab, *nodes, directory=project.path.parent) as captures:
        project.succeed("train", str(private_job), *RUN, "--strategy", "features")
    for node in nodes:
        stored = [path for path in (node.home / ".csdctl").rglob("*") if path.is_file()]
        assert any(find_computed(path.read_bytes()) for path in stored)
        content = captures[node.name].path.read_bytes()
        assert not find_canaries(content)
        assert not find_computed(content)
    for path in project.path.rglob("*"):
        assert not path.is_file() or not find_computed(path.read_bytes()), path
    check_ledger(project, captures)


def test_activations_leave_when_the_job_says_so_and_are_counted(project: Project, private_job: Path) -> None:
    nodes = project.lab.near[:2]
    with captured(project.lab, *nodes, directory=project.path.parent) as refused:
        done = project.csdctl("train", str(private_job), *RUN, *SPLIT)
    assert done.returncode == 2
    assert "activations: may-leave" in done.stderr
    assert not any(find_computed(capture.path.read_bytes()) for capture in refused.values())
    before = {name: capture.payload() for name, capture in refused.items()}
    private_job.write_text(JOB % ", activations: may-leave")
    with captured(project.lab, *nodes, directory=project.path.parent) as captures:
        project.succeed("train", str(private_job), *RUN, *SPLIT)
    host = project.lab.front.ipv4(1)
    ledger = (project.path / ".csdctl" / "ledger.jsonl").read_text()
    flows = [json.loads(line) for line in ledger.splitlines()]
    for name, capture in captures.items():
        content = capture.path.read_bytes()
        assert find_computed(content)
        assert not find_canaries(content)
        sent = [flow for flow in flows if flow["sender"] == name and flow["receiver"] == "host"]
        activations = sum(flow["num_bytes"] for flow in sent if flow["kind"] == "activations")
        other_bytes = sum(flow["num_bytes"] for flow in sent) - activations
        ends = capture.address, host
        on_cable = capture.payload()[ends] + before[name][ends]
        print(
            f"{name}: {on_cable:,} bytes on the cable, {activations:,} of activations, {other_bytes:,} others"
        )
        assert activations == EPOCHS * NUM_PRIVATE * (IMAGE.size * 4 + LABEL_BYTES)
        assert activations == pytest.approx(on_cable - other_bytes, rel=TOLERANCE)
