"""Strategies to train one model on one fleet: whole models, features, and a split between nodes and host.

    make bench ARGS="-k strategies"

EfficientNet-Lite0 with ImageNet weights, 12,000 pictures of Fashion-MNIST at 96×96, an emulated host with one
thread and four nodes at 22% of a core. Long trainings are extrapolated from their steps. Prints figures,
asserts no limits.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.running import csdctl, emulated_fleet, write_plan
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import keep_nodes
from csdctl.job.model import load_job
from csdctl.tuning.plan import load_plan
from csdctl.worker.protocol.features import FLOAT32
from csdctl.workflows.data.prepare import prepare_in
from csdctl.workflows.train.resolved import RunContext, read_plan
from csdctl.workflows.train.strategies import FeatureStrategy, compute_features
from csdctl.workflows.workspace.event_stream import EventStream, WorkProgressed
from csdctl.workflows.workspace.workspace import open_workspace
from examples.sample_data import fetch_fashion_mnist
from examples.transfer_learning import efficientnet_lite0

NUM_NODES, CPU = 4, 0.22
NUM_PUBLIC, NUM_PRIVATE, NUM_VALIDATION = 8000, 1000, 2000
EPOCHS = 10
HOST_BATCH, NODE_BATCH = 64, 14
NUM_SAMPLES = NUM_PUBLIC + NUM_NODES * NUM_PRIVATE
FULL_STEPS, SKIPPED_REPORTS = 16, 4
"""Steps of a training whose time is extrapolated; a report is about one step."""
SPLIT_BATCH = 32
NUM_ALONE = 2000
CUT = "b4_add"
JOB = """\
model: efficientnet_lite0.py:{build}
data:
  public: {{path: public.npz}}
  private: {{path: ~/private.npz, activations: may-leave}}
  validation: {{path: validation.npz}}
  input_range: null
recipe:
  {{epochs: {epochs}, optimizer: sgd, momentum: 0.9, learning_rate: {rate}, metrics: [accuracy]}}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("strategies")
    shutil.copy(efficientnet_lite0.__file__, directory)
    efficientnet_lite0.fetch_weights(directory)
    with emulated_fleet(directory, NUM_NODES, CPU, host_threads=1):
        _write_pictures(directory)
        yield directory


def _write_pictures(directory: Path) -> None:
    fashion = fetch_fashion_mnist(directory / "fashion")
    places = [directory / "public.npz", directory / "validation.npz"]
    nodes = directory / ".csdctl" / "emulated" / "nodes"
    places += [nodes / f"csd{number}" / "home" / "private.npz" for number in range(NUM_NODES)]
    sizes = [NUM_PUBLIC, NUM_VALIDATION, *[NUM_PRIVATE] * NUM_NODES]
    start = 0
    for place, size in zip(places, sizes, strict=True):
        part = slice(start, start + size)
        start += size
        large = fashion.train_images[part, ..., 0].repeat(3, axis=1).repeat(3, axis=2)
        padded = np.pad(large, [(0, 0), (6, 6), (6, 6)])
        np.savez(
            place, x=np.repeat(padded[..., None], 3, axis=3), y=fashion.train_labels[part].astype(np.int32)
        )


def write_job(
    project: Path,
    name: str,
    build: str = "build",
    *,
    rate: float = 0.01,
    epochs: int = EPOCHS,
    public: str = "",
    is_validated: bool = True,
) -> str:
    """Write a job and its plan; with `public`, a file, its pictures are all public."""
    content = yaml.safe_load(JOB.format(build=build, rate=rate, epochs=epochs))
    if public:
        content["data"]["public"] = {"path": public}
        del content["data"]["private"]
    if not is_validated:
        del content["data"]["validation"]
    (project / f"{name}.yaml").write_text(yaml.safe_dump(content))
    csdctl(project, "prepare", f"{name}.yaml")
    nodes = [{"node": f"csd{number}", "batch_size": NODE_BATCH, "threads": 1} for number in range(NUM_NODES)]
    write_plan(project, f"{name}.yaml", [{"node": "host", "batch_size": HOST_BATCH, "threads": 1}, *nodes])
    return f"{name}.yaml"


def train(project: Path, job: str, *arguments: str) -> tuple[dict[str, Any], float]:
    """Return the report of a training, and the seconds of the whole command."""
    began = time.monotonic()
    *_, report = csdctl(project, "train", job, "--plan", "plan.yaml", "--no-rebalance", *arguments)
    return report, time.monotonic() - began


def steady_rate(project: Path, report: dict[str, Any]) -> float:
    """Return the samples/s of a run without its first steps, in which kernels are chosen."""
    lines = (project / report["path"] / "events.jsonl").read_text().splitlines()
    points = [
        (event["time"], event["global_samples"])
        for event in map(json.loads, lines)
        if event["event"] == "Progress" and event["rank"] == 0
    ][SKIPPED_REPORTS:]
    return float(sum(count for _, count in points[1:]) / (points[-1][0] - points[0][0]))


def test_features(project: Path) -> None:
    features = ("--strategy", "features")
    first, first_s = train(project, write_job(project, "frozen"), *features)
    second, second_s = train(project, write_job(project, "faster", rate=0.02), *features)
    once = write_job(project, "once", epochs=1)
    whole, whole_s = train(project, once)
    same, _ = train(project, once, *features)
    trained = write_job(project, "trained", "build_trained", epochs=1)
    full, _ = train(project, trained, "--max-steps", str(FULL_STEPS))
    start_s = whole_s - whole["training_s"]
    frozen_s = start_s + EPOCHS * whole["training_s"]
    full_rate = steady_rate(project, full)
    full_s = start_s + EPOCHS * NUM_SAMPLES / full_rate
    print(f"\nfeatures, {EPOCHS} epochs: {first_s:.0f} s, accuracy {first['validation_accuracy']:.4f}")
    print(f"again, another rate: {second_s:.0f} s, accuracy {second['validation_accuracy']:.4f}")
    print(f"frozen, data-parallel: an epoch {whole['training_s']:.0f} s, {EPOCHS} epochs {frozen_s:.0f} s")
    print(f"all layers, data-parallel: {full_rate:.1f} samples/s, {full_s:.0f} s")
    print(f"features {frozen_s / first_s:.1f} and {full_s / first_s:.1f} times as fast as these")
    print(f"again {frozen_s / second_s:.1f} and {full_s / second_s:.1f} times as fast")
    print(
        f"accuracy after one epoch: data-parallel {whole['validation_accuracy']:.4f}, "
        f"features {same['validation_accuracy']:.4f}"
    )


def test_features_of_public_samples(project: Path) -> None:
    """The same number of pictures, all public: with all ranks, and on the host alone."""
    with np.load(project / "public.npz") as public:
        pictures, labels = public["x"], public["y"]
    rows = np.arange(NUM_SAMPLES) % len(labels)  # the same work as of other pictures
    np.savez(
        project / "all-public.npz",
        x=pictures[rows] ^ (rows >= len(labels))[:, None, None, None],
        y=labels[rows],
    )
    taken = {}
    for number, (name, rate, trains_on_host) in enumerate(
        (
            ("all ranks", 0.01, False),
            ("all ranks again", 0.02, False),
            ("host alone", 0.01, True),
            ("host alone again", 0.02, True),
            ("frozen, data-parallel, an epoch", 0.01, None),
        )
    ):
        epochs = 1 if trains_on_host is None else EPOCHS
        job = write_job(project, f"open{number}", rate=rate, epochs=epochs, public="all-public.npz")
        if trains_on_host is not None:
            plan = yaml.safe_load((project / "plan.yaml").read_text())
            changed = {"strategy": "features", "trains_on_host": trains_on_host}
            (project / "plan.yaml").write_text(yaml.safe_dump(plan | changed))
            if not name.endswith("again"):
                csdctl(project, "clean", "--computed", "--yes")
        report, elapsed_s = train(project, job)
        taken[name] = elapsed_s
        print(f"\n{name}: {elapsed_s:.0f} s, accuracy {report['validation_accuracy']:.4f}")
    frozen_s = elapsed_s + (EPOCHS - 1) * report["training_s"]
    print(f"frozen, data-parallel, {EPOCHS} epochs: {frozen_s:.0f} s")
    for name, elapsed_s in taken.items():
        print(f"{name}: {frozen_s / elapsed_s:.1f} times as fast")


class Watch:
    """Times at which each machine had computed how many samples."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[float, int]]] = {}

    def take(self, event: object) -> None:
        """Note what machines report."""
        if isinstance(event, WorkProgressed) and event.progress.num_done:
            self.seen.setdefault(event.name, []).append((time.monotonic(), event.progress.num_done))

    def rate_of(self, node: str) -> float:
        """Return the samples/s of one machine from its first report to its last."""
        (first_s, first), *_, (last_s, last) = self.seen[node]
        return (last - first) / (last_s - first_s)

    @property
    def rate(self) -> float:
        """The samples/s of all, from the first report of any to the last of all."""
        first_s = min(rows[0][0] for rows in self.seen.values())
        last_s = max(rows[-1][0] for rows in self.seen.values())
        return sum(rows[-1][1] - rows[0][1] for rows in self.seen.values()) / (last_s - first_s)


def extract_on(project: Path, public: str, sizes: dict[str, int]) -> Watch:
    """Compute features of public samples, divided by the batch sizes of the machines."""
    write_job(project, "public-only", epochs=1, public=public, is_validated=False)
    ranks = [{"node": node, "batch_size": size, "threads": 1} for node, size in sizes.items()]
    write_plan(project, "public-only.yaml", ranks)
    for features in project.rglob("features"):
        shutil.rmtree(features, ignore_errors=True)
    fleet = load_fleet(project / "fleet.yaml")
    chosen = keep_nodes(fleet, [node for node in sizes if node != "host"])
    watch, job = Watch(), load_job(project / "public-only.yaml")
    with open_workspace(project, chosen, "train", is_locking=True) as space:
        events = EventStream((watch.take,))
        context = RunContext(job, prepare_in(space, job, events), space, events)
        data = read_plan(load_plan(project / "plan.yaml").ranks, context)
        compute_features(data, FeatureStrategy(FLOAT32).divide(context), context)
    return watch


def test_extraction_together(project: Path) -> None:
    """Nodes and host at the same time, against each alone."""
    some = np.load(project / "public.npz")
    np.savez(project / "some.npz", x=some["x"][:NUM_ALONE], y=some["y"][:NUM_ALONE])
    host = extract_on(project, "some.npz", {"host": 64}).rate_of("host")
    node = extract_on(project, "some.npz", {"host": 0, "csd0": 14}).rate_of("csd0")
    sizes = {"host": 64} | {f"csd{number}": round(64 * node / host) for number in range(NUM_NODES)}
    watch = extract_on(project, "public.npz", sizes)
    alone = host + NUM_NODES * node
    each = sum(watch.rate_of(name) for name in sizes)
    print(
        f"\nhost alone {host:.0f}, a node alone {node:.0f} samples/s, {alone:.0f} in all; "
        f"together {each:.0f} ({each / alone:.3f}), to the end of the last {watch.rate:.0f} "
        f"({watch.rate / alone:.3f})"
    )


@contextlib.contextmanager
def separated(project: Path) -> Iterator[None]:
    """Keep host and nodes to cores of their own, as machines are: on shared ones, each delays the other."""
    cores = sorted(os.sched_getaffinity(0))
    (status,) = csdctl(project, "emulate", "status")
    threads = [
        int(task.name) for node in status["nodes"] for task in Path(f"/proc/{node['pid']}/task").iterdir()
    ]
    for thread in threads:
        os.sched_setaffinity(thread, cores[1:] or cores)
    os.sched_setaffinity(0, cores[:1])
    try:
        yield
    finally:
        for thread in (0, *threads):
            os.sched_setaffinity(thread, cores)


def test_split(project: Path) -> None:
    """All data but a few samples is private: the host has nothing of its own to do."""
    job = write_job(project, "trained", "build_trained", epochs=1)
    ranks = [{"node": f"csd{number}", "batch_size": SPLIT_BATCH, "threads": 1} for number in range(NUM_NODES)]
    write_plan(project, job, [{"node": "host", "batch_size": 0, "threads": 1}, *ranks])
    rates: dict[str, list[float]] = {"data-parallel": [], "split": []}
    with separated(project):
        for _ in range(2):
            for strategy, found in rates.items():
                cut = ("--cut", CUT) if strategy == "split" else ()
                report, _ = train(project, job, "--strategy", strategy, *cut, "--max-steps", str(FULL_STEPS))
                found.append(steady_rate(project, report))
    whole, split = (max(found) for found in rates.values())
    print(f"\ndata-parallel {rates['data-parallel']}, split {rates['split']} samples/s")
    print(f"split: {1 - whole / split:.1%} less time")
