"""Predicting private data in place against pulling it to the host over 100 Mbit/s and predicting there.

    make bench ARGS="-k predict"

A host with one thread and four nodes at 22% of a core, which share a link of 100 Mbit/s: each may send at a
quarter of that. Prints a table, asserts that both find the same classes, no limits. The data is prepared
already, as after a training. `pull` copies the prepared samples from all nodes at once with `ssh … cat`, then
one process with one thread predicts all of them; nothing of csdctl is in it. CSDCTL_BENCH_SMOKE=1 only checks
that it works; its figures mean nothing.
"""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.slow_nodes import CPU, write_fleet
from tests.bench.tuned import run_csdctl
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.project import Project

IS_SMOKE = os.environ.get("CSDCTL_BENCH_SMOKE") == "1"
NUM_NODES = 4
LINK_MBIT_PER_S = 100.0
SHAPE = (96, 96, 3)
NUM_PICTURES = {"light": 200 if IS_SMOKE else 12_000, "mobilenet": 100 if IS_SMOKE else 2_000}
"""Of each node."""
BUILD = {
    "light": "keras.Sequential([keras.Input((96, 96, 3)), "
    "layers.Conv2D(16, 5, strides=4, activation='relu'), "
    "layers.Conv2D(32, 3, strides=2, activation='relu'), layers.GlobalAveragePooling2D(), "
    "layers.Dense(10, activation='softmax')])",
    "mobilenet": "keras.applications.MobileNetV2(input_shape=(96, 96, 3), classes=10, weights=None)",
}
SAVE = """\
import sys, keras
from keras import layers
keras.utils.set_random_seed(0)
model = eval(sys.argv[1])
model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
model.save(sys.argv[2])
"""
PREDICT = """\
import json, sys, time
started = time.monotonic()
import keras, numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
model = keras.models.load_model(sys.argv[1])
forward = tf.function(lambda samples: model(tf.cast(samples, tf.float32) * (1 / 255), training=False))
classes, first_s = {}, None
for path in sys.argv[2:]:
    samples = np.load(path, mmap_mode="r")
    found = []
    for start in range(0, len(samples), 32):
        padded = np.zeros((32, *samples.shape[1:]), samples.dtype)
        part = samples[start : start + 32]
        padded[: len(part)] = part
        found += np.asarray(forward(padded))[: len(part)].argmax(axis=1).tolist()
        first_s = first_s or time.monotonic() - started
    classes[path] = found
all_s = time.monotonic() - started
print(json.dumps({"classes": list(classes.values()), "start_s": first_s, "all_s": all_s}))
"""

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def nodes(lab: Lab) -> Iterator[Sequence[LabNode]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(lab.node(f"slow{number}", 60 + number, cpu=CPU))
            for number in range(NUM_NODES)
        ]


def write_data(project: Project, nodes: Sequence[LabNode], work: str) -> None:
    """Write the job, the model, one public picture and the private pictures of each node."""
    (project.path / "job.yaml").write_text(
        "model: trained.keras\n"
        f"data: {{public: {{path: public}}, private: {{path: /root/{work}}}}}\n"
        "recipe: {epochs: 1, learning_rate: 0.01}\n"
    )
    command = [sys.executable, "-c", SAVE, BUILD[work], str(project.path / "trained.keras")]
    subprocess.run(command, check=True, capture_output=True)
    places = [project.path / "public", *(node.home / work for node in nodes)]
    for number, place in enumerate(places):
        place.mkdir()
        count = NUM_PICTURES[work] if number else 10
        generator = np.random.default_rng(number)
        np.save(place / "images.npy", generator.integers(0, 256, (count, *SHAPE), np.uint8))
        np.save(place / "labels.npy", generator.integers(0, 10, count).astype(np.int32))


def pull(project: Project, nodes: Sequence[LabNode], work: str) -> float:
    """Copy the pictures of all nodes at once; return the seconds."""
    started = time.monotonic()
    copying = []
    for node in nodes:
        known = project.path / ".csdctl" / "known_hosts"
        ssh = f"ssh -F none -i {project.lab.key} -o UserKnownHostsFile={known} -o BatchMode=yes"
        command = f"{ssh} root@{node.spec.address} cat {work}/images.npy > {node.name}.npy"
        copying.append(project.lab.host.start("sh", "-c", command, cwd=project.path))
    assert [process.wait() for process in copying] == [0] * len(nodes)
    return time.monotonic() - started


def classes_in(path: Path) -> list[list[int]]:
    by_node: dict[str, list[int]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            by_node.setdefault(row["node"], []).append(int(row["class"]))
    return list(by_node.values())


@pytest.mark.parametrize("work", list(BUILD))
def test_predicting_in_place_against_pulling(
    lab: Lab, nodes: Sequence[LabNode], tmp_path: Path, work: str
) -> None:
    project = Project(lab, tmp_path)
    project.trust(*nodes)
    write_fleet(project, nodes)
    write_data(project, nodes, work)
    run_csdctl(project, "prepare")
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.limited_to(LINK_MBIT_PER_S / NUM_NODES))
        started = time.monotonic()
        ((found,), _) = run_csdctl(project, "predict", "trained.keras")
        in_place_s = time.monotonic() - started
        pulled_s = pull(project, nodes, work)
    files = [str(project.path / f"{node.name}.npy") for node in nodes]
    command = [sys.executable, "-c", PREDICT, str(project.path / "trained.keras"), *files]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    on_host: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert classes_in(project.path / "predictions.csv") == on_host["classes"]
    ledger = [json.loads(line) for line in (project.path / ".csdctl/ledger.jsonl").read_text().splitlines()]
    sent = sum(entry["num_bytes"] for entry in ledger if entry["kind"] == "classes of private samples")
    pulled = sum(os.path.getsize(file) for file in files)
    there_s = pulled_s + on_host["all_s"]
    print(
        f"\n{work}, {found['num_rows']:,} pictures of 96×96\n"
        f"  in place {in_place_s:6.1f} s  {sent / 1e6:10.2f} MB of classes\n"
        f"  pulled   {there_s:6.1f} s  {pulled / 1e6:10.2f} MB of pictures in {pulled_s:.1f} s, then "
        f"{on_host['all_s']:.1f} s on the host, {on_host['start_s']:.1f} s of them to the first batch\n"
        f"  {there_s / in_place_s:.2f} × the time, {pulled / sent:,.0f} × the bytes"
    )
