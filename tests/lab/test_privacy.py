"""Private data stays on its node: all commands and strategies, with all traffic captured."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab.capture import Capture, captured
from tests.lab.machines import LabNode
from tests.lab.project import Project
from tests.unit.worker.ingest.sources.encoded_images import png

pytestmark = pytest.mark.lab

NETWORK = "10.77.0.0/23"
CANARY = b"\xc5\x1dcanary-of-a-private-sample\x9e\x07"
CANARY_NAME = "canary-of-a-private-name"
TOLERANCE = 0.02


def put_canaries(node: LabNode, *, with_pictures: bool = False) -> None:
    """Write private samples that consist of canaries, in files named after a canary; one image is corrupt."""
    place = node.home / "private"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    image = np.frombuffer((CANARY * 3)[:64], np.uint8).reshape(8, 8, 1)
    if not with_pictures:
        images = np.repeat(image[np.newaxis], 24, axis=0)
        np.savez(place / f"{CANARY_NAME}.npz", x=images, y=np.arange(24) % 2)
        return
    for label in ("0", "1"):
        (place / label).mkdir()
        for number in range(12):
            (place / label / f"{CANARY_NAME}-{number}.png").write_bytes(png(image))
    encoded = png(image)
    (place / "1" / f"{CANARY_NAME}-corrupt.png").write_bytes(encoded[: len(encoded) // 2] + CANARY)


def find_canaries(content: bytes) -> bool:
    """Return whether `content` contains part of a private sample, at any alignment, or a private name."""
    return CANARY_NAME.encode() in content or any(
        CANARY[start : start + 12] in content for start in range(0, len(CANARY) - 12, 4)
    )


def search_host(directory: Path) -> list[str]:
    """Return the files of the user's directory with a canary in their content or name."""
    paths = []
    for place, _, names in os.walk(directory):
        for name in names:
            path = Path(place, name)
            if path.is_file() and find_canaries(name.encode() + path.read_bytes()):
                paths.append(str(path))
    return paths


def check_ledger(project: Project, captures: dict[str, Capture]) -> None:
    recorded = Counter[tuple[str, str]]()
    for line in (project.path / ".csdctl" / "ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        recorded[entry["sender"], entry["receiver"]] += entry["num_bytes"]
    host = project.lab.front.ipv4(1)
    for name, capture in captures.items():
        seen = capture.payload()
        for ends, link in (
            ((host, capture.address), ("host", name)),
            ((capture.address, host), (name, "host")),
        ):
            print(f"{link}: {seen[ends]:,} bytes on the cable, {recorded[link]:,} in the ledger")
            assert recorded[link] == pytest.approx(seen[ends], rel=TOLERANCE), link


def check_report(document: dict[str, Any]) -> None:
    assert (document["state"], document["num_ranks"]) == ("completed", 3)
    assert document["identical_weights"] is True
    assert [rank["num_private"] for rank in document["ranks"]] == [0, 24, 24]


@pytest.mark.parametrize(
    "with_pictures",
    [pytest.param(False, id="arrays"), pytest.param(True, id="pictures", marks=pytest.mark.thorough)],
)
def test_from_discover_to_report_no_private_byte_leaves_and_the_ledger_is_right(
    project: Project, job: Path, *, with_pictures: bool
) -> None:
    nodes = project.lab.near[:2]
    project.use(*nodes, network=NETWORK)
    private = job.with_name("canary.yaml")
    classes = ", classes: ['0', '1']" if with_pictures else ""
    text = job.read_text().replace("path: public}", f"path: public}}, private: {{path: private}}{classes}")
    private.write_text(text.replace("epochs: 2", "epochs: 40"))
    for node in nodes:
        put_canaries(node, with_pictures=with_pictures)
    output = b""
    with captured(project.lab, *nodes, directory=project.path.parent) as captures:
        for command in (
            ["discover"],
            ["doctor"],
            ["prepare", str(private)],
            *([["tune", str(private), "--probe-seconds", "0.1"]] if with_pictures else []),
            ["train", str(private), "--json", *(() if with_pictures else ("--batch-size", "8"))],
            ["predict", "latest", "--on", "all", "--want", "scores"],
            ["report"],
            ["report", "--privacy"],
        ):
            done = project.succeed(*command)
            output += (done.stdout + done.stderr).encode()
            if command[0] == "train":
                check_report(json.loads(done.stdout.splitlines()[-1]))
    assert (b"1 undecodable" in output) == with_pictures
    for capture in captures.values():
        assert not find_canaries(capture.path.read_bytes()), capture.node
    assert not find_canaries(output)
    assert search_host(project.path) == []
    assert search_host(job.parent) == []
    check_ledger(project, captures)


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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_activations_leave_when_the_job_says_so_and_are_counted(project: Project, private_job: Path) -> None:
    nodes = project.lab.near[:2]
    with captured(project.lab, *nodes, directory=project.path.parent) as refused:
        said = project.refuse("train", str(private_job), *RUN, *SPLIT, code=2)
    assert "activations: may-leave" in said
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
