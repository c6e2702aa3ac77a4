"""Losses of ranks, links, daemons, machines and cables: how long the other ranks wait for their next step.

    make bench ARGS="-k losses"

Five nodes with 22% of a core, each behind a cable of its own, and SSH over another network. Each kind of
loss is caused NUM_LOSSES times in one training (variables CSDCTL_LOSSES and CSDCTL_LOSS_KINDS). A step of
rank 0 is seen by its step file, which is written after each. Prints figures, asserts no limits.
"""

import json
import mmap
import os
import random
import signal
import statistics
import struct
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.network import list_processes, run_ip
from tests.lab.project import Project
from tests.lab.test_links import cable

NUMBER = struct.Struct("<q")
NUM_LOSSES = int(os.environ.get("CSDCTL_LOSSES", "20"))
KINDS_TO_CAUSE = os.environ.get("CSDCTL_LOSS_KINDS", "rank,link,mpirun,daemon,cable,node").split(",")
NUM_NODES, CPU = 5, 0.22
WINDOW_S = 8.0
BACK_S = 180.0
NUM_MINUTES, QUIET_S = 10, 30.0
THROTTLED_S = 600.0
MODEL = """\
import keras


def build():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((16, 16, 1)), layers.Conv2D(8, 3), layers.Flatten(), layers.Dense(10, "softmax")]
    )
"""
JOB = """\
model: small.py:build
data: {public: {path: public}}
recipe: {epochs: 100000, learning_rate: 0.001, reference_batch: 48}
"""


@contextmanager
def five_nodes(lab: Lab, cpu: float = CPU) -> Iterator[list[LabNode]]:
    with ExitStack() as stack:
        nodes = []
        for number in range(NUM_NODES):
            node = stack.enter_context(lab.node(f"slow{number}", 100 + number, cpu=cpu))
            first = 4 * number
            pair = (f"10.92.{number}.{first + 1}/30", f"10.92.{number}.{first + 2}/30")
            stack.enter_context(cable(lab, node, [pair]))
            nodes.append(node)
        yield nodes


def write_job(directory: Path) -> None:
    images = np.random.default_rng(7).integers(0, 256, (9600, 16, 16, 1), dtype=np.uint8)
    (directory / "public").mkdir()
    np.save(directory / "public" / "images.npy", images)
    np.save(directory / "public" / "labels.npy", images[:, 0, 0, 0].astype(np.int64) % 10)
    (directory / "small.py").write_text(MODEL)
    (directory / "job.yaml").write_text(JOB)


class Steps:
    """When rank 0 has completed its steps, in Unix seconds."""

    def __init__(self, run: Path) -> None:
        self.times: list[float] = []
        self._path, self._is_over = Path(json.loads((run / "spec.json").read_text())["step_file"]), False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._path.exists():
            time.sleep(0.01)
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as halves:
            places = 0, len(halves) // 2
            latest = 0
            while not self._is_over:
                # Twice the number of the step; 0 while a half is written.
                number = max(NUMBER.unpack_from(halves, place)[0] for place in places)
                if number > latest:
                    latest = number
                    self.times.append(time.time())
                time.sleep(0.001)

    def longest_gap(self, since: float) -> float:
        """Return the longest time between two steps that ends after `since`."""
        times = [moment for moment in self.times if moment > since - 1.0]
        return max(later - earlier for earlier, later in pairwise(times) if later > since)

    def end(self) -> None:
        self._is_over = True


def pids_of(namespace: str, words: str, programs: tuple[str, ...] = ()) -> list[int]:
    """Return the processes with `words` in their command line, of `programs` alone if given; no shells."""
    found = []
    for pid in list_processes(namespace):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        is_wanted = line.partition(" ")[0].endswith(programs) if programs else True
        if words in line and is_wanted and not line.startswith(("sh ", "/bin/sh")):
            found.append(pid)
    return found


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def pull(node: LabNode) -> None:
    run_ip(node.namespace, "link set mpi down")
    time.sleep(6.0)
    run_ip(node.namespace, "link set mpi up")


def power_cycle(node: LabNode) -> None:
    run_ip(node.namespace, "link set mpi down")
    node.power_off()
    time.sleep(6.0)
    node.restart()
    run_ip(node.namespace, "link set mpi up")


MPIRUN = "mpirun", "prterun"
KINDS: dict[str, Callable[[Lab, LabNode, int], object]] = {
    "rank": lambda lab, node, rank: kill(pids_of(node.namespace, "rank --spec")),
    "link": lambda lab, node, rank: kill(pids_of(node.namespace, f"link --rank {rank} ")),
    "mpirun": lambda lab, node, rank: kill(pids_of(lab.host.namespace, f"link --rank {rank} ", MPIRUN)),
    "daemon": lambda lab, node, rank: kill(pids_of(node.namespace, "bin/prted")),
    "cable": lambda lab, node, rank: pull(node),
    "node": lambda lab, node, rank: power_cycle(node),
}


def events_of(run: Path) -> list[dict[str, object]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def count(run: Path, kind: str) -> int:
    return sum(event["event"] == kind for event in events_of(run))


def await_back(run: Path, since: float) -> float:
    """Return the seconds until a rank took part again."""
    while time.time() - since < BACK_S:
        for event in events_of(run):
            if event["event"] == "NodeBack" and float(str(event["time"])) > since:
                return float(str(event["time"])) - since
        time.sleep(0.2)
    raise TimeoutError("the rank is not back")


@contextmanager
def training(lab: Lab, project: Project, cpu: float = CPU) -> Iterator[tuple[list[LabNode], Path]]:
    """Train with five nodes; yield them and the run directory once all take part."""
    write_job(project.path)
    with five_nodes(lab, cpu) as nodes:
        project.use(*nodes, network="10.92.0.0/16")
        running = project.start("train", "--batch-size", "8", "--skip-doctor")
        try:
            runs = project.path / ".csdctl" / "runs"
            while not any(runs.glob("*/events.jsonl")) or not count(next(runs.glob("*")), "Joined"):
                assert running.poll() is None, running.communicate()
                time.sleep(0.5)
            yield nodes, next(runs.glob("*"))
            assert running.poll() is None
        finally:
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=120)


@pytest.fixture
def project(lab: Lab, tmp_path: Path) -> Project:
    return Project(lab, tmp_path)


def test_losses(lab: Lab, project: Project) -> None:
    draw = random.Random(7)
    with training(lab, project) as (nodes, run):
        steps = Steps(run)
        time.sleep(5.0)
        gaps = [b - a for a, b in pairwise(steps.times)]
        print(f"\nstep: median {1000 * statistics.median(gaps):.0f} ms, longest {max(gaps):.3f} s")
        for kind in KINDS_TO_CAUSE:
            waits, backs = [], []
            for _ in range(NUM_LOSSES):
                rank = draw.randrange(1, NUM_NODES + 1)
                num_lost = count(run, "NodeLost")
                began = time.time()
                KINDS[kind](lab, nodes[rank - 1], rank)
                time.sleep(max(0.0, began + WINDOW_S - time.time()))
                waits.append(steps.longest_gap(began))
                backs.append(await_back(run, began))
                if count(run, "NodeLost") != num_lost + 1:
                    print(f"{kind}: {count(run, 'NodeLost') - num_lost} losses in place of one")
                time.sleep(1.0)
            print(
                f"{kind}: next step after {statistics.median(waits):.3f} s, worst {max(waits):.3f} s; "
                f"back after {statistics.median(backs):.1f} s, worst {max(backs):.1f} s",
                flush=True,
            )
        steps.end()
        joined = [event for event in events_of(run) if event["event"] == "Joined"]
        print(f"events Joined: {len(joined)}, lost samples at last: {joined[-1]['num_lost']}")


def test_throttled_nodes_are_not_lost(lab: Lab, project: Project) -> None:
    """Ten minutes with 10% of a core for each node: the kernel stops them most of the time."""
    with training(lab, project, 0.10) as (_, run):
        time.sleep(THROTTLED_S)
        names = ("Joined", "NodeLost", "Warned", "EpochEnd")
        print("\nnodes at 10% of a core:", {name: count(run, name) for name in names})


def samples_in(run: Path, steps: Steps, since: float) -> int:
    """Return the samples of the steps since then: those of all ranks that took part at the time."""
    joined = [event for event in events_of(run) if event["event"] == "Joined" and event["rank"] == 0]
    times = [float(str(event["time"])) for event in joined]
    sizes = [sum(dict(event["batch_sizes"]).values()) for event in joined]  # type: ignore[call-overload]
    return sum(sizes[bisect(times, moment) - 1] for moment in steps.times if moment > since)


def test_goodput_with_a_loss_each_minute(lab: Lab, project: Project) -> None:
    """Compare each minute with the half minute before it: the speed of a machine drifts."""
    draw = random.Random(7)
    with training(lab, project) as (nodes, run):
        steps = Steps(run)
        time.sleep(5.0)
        done, expected = 0.0, 0.0
        for _ in range(NUM_MINUTES):
            since = time.time()
            time.sleep(QUIET_S)
            rate = samples_in(run, steps, since) / (time.time() - since)
            since = time.time()
            rank = draw.randrange(1, NUM_NODES + 1)
            kind = draw.choice(["rank", "link", "mpirun", "daemon"])
            KINDS[kind](lab, nodes[rank - 1], rank)
            time.sleep(60.0)
            samples, elapsed_s = samples_in(run, steps, since), time.time() - since
            done, expected = done + samples, expected + rate * elapsed_s
            print(f"\n{kind}: {samples / elapsed_s / rate:.3f} of {rate:.0f} samples/s", end="", flush=True)
        steps.end()
        print(f"\nsamples with a loss each minute: {done / expected:.3f} of those without")
