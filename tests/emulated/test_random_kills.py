"""Thirty processes of one training are killed at random moments: ranks, links, daemons, hub and rank 0."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.protocol.processes import load_stat
from tests.emulated.running import emulated, home_of, succeed
from tests.emulated.small_jobs import pausing_layer, small_job
from tests.emulated.training import (
    assert_all_read_once,
    events_of,
    hash_at_the_end,
    nothing_is_left,
    of_fleet,
    processes,
    program_of,
    start_run,
)
from tests.patience import communicate, wait_for

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NODES = ("csd0", "csd1", "csd2")
NUM_PUBLIC, NUM_PRIVATE = 400, 60
NUM_KILLS = 30
MAX_PAUSE_S = 4.0
"""Shorter than the restart of a rank."""
JOB = small_job("epochs: 1000000, optimizer: adam, learning_rate: 0.001", ".npz")
BUILD = """

def build():
    layers = [%s, keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""
MODELS = {
    "compiled": "import keras\n" + BUILD % "keras.layers.Conv2D(256, 3), keras.layers.Conv2D(256, 3)",
    "by Python's TensorFlow": pausing_layer(0.05) + BUILD % "Pause()",
}


def write_samples(path: Path, count: int) -> None:
    generator = np.random.default_rng(count)
    pictures = generator.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    np.savez(path, x=pictures, y=np.arange(count) % 3)


@pytest.fixture(params=MODELS)
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with emulated(tmp_path, len(NODES), {"job.yaml": JOB, "model.py": MODELS[request.param]}):
        write_samples(tmp_path / "public.npz", NUM_PUBLIC)
        for node in NODES:
            write_samples(home_of(tmp_path, node) / "private.npz", NUM_PRIVATE)
        said = succeed(tmp_path, "prepare")
        is_compiled = "runs with Python's TensorFlow" not in said.stdout + said.stderr
        assert is_compiled == (request.param == "compiled")
        yield tmp_path


def find_python(*words: str) -> list[int]:
    return [pid for pid in processes(*words) if program_of(pid).startswith("python")]


def targets(project: Path, run: Path) -> dict[str, Callable[[], list[int]]]:
    """Return how to find the processes of each kind."""
    marker = f"csdctl-run={run.name}"
    return {
        "rank": lambda: [pid for node in NODES for pid in find_python(" rank --spec", f"{marker}/{node}")],
        "end of a link on a node": lambda: [
            pid for node in NODES for pid in find_python(" link --rank", f"{marker}/{node}")
        ],
        "end of a link on the host": lambda: find_python(" link --rank", f"{marker}/host"),
        "mpirun": lambda: [pid for pid in processes(marker) if program_of(pid) == "prterun"],
        "daemon": lambda: of_fleet(processes("prted"), project, "prted"),
        "hub": lambda: [
            pid
            for pid in find_python(" hub --descriptor")
            if (stat := load_stat(pid)) and stat.parent in find_python(" rank --spec", f"{marker}/host")
        ],
        "rank 0": lambda: find_python(" rank --spec", f"{marker}/host"),
    }


def are_others_back(run: Path) -> bool:
    """Return whether rank 0 has done steps with others: one that is always killed before trains alone."""
    _, _, since = (run / "events.jsonl").read_text().rpartition('"event":"Joined"')
    joined = events_of(run, "Joined")[-1]
    is_up = '"event":"Progress","rank":0' in since and '"event":"NodeLost","rank":0' not in since
    return is_up and len(joined["batch_sizes"]) > 1


@pytest.mark.fault(44)
@pytest.mark.fault(45)
@pytest.mark.fault(48)
def test_thirty_random_kills_leave_the_same_weights_and_every_sample_read_once(project: Path) -> None:
    process, run = start_run(project, "--batch-size", "8", "--skip-doctor", "--min-nodes", "0")
    chosen, find_pids = random.Random(51), targets(project, run)
    kinds = [*find_pids] * -(-NUM_KILLS // len(find_pids))
    chosen.shuffle(kinds)
    for kind in kinds[:NUM_KILLS]:
        time.sleep(chosen.uniform(0, MAX_PAUSE_S))
        if kind in ("hub", "rank 0"):
            wait_for(lambda: are_others_back(run), process, project)
        pids: list[int] = wait_for(find_pids[kind], process, project)
        with contextlib.suppress(ProcessLookupError):
            os.kill(chosen.choice(pids), signal.SIGKILL)
    num_ends = len(events_of(run, "EpochEnd"))
    wait_for(lambda: len(events_of(run, "EpochEnd")) > num_ends + 2 * len(NODES), process, project)
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process, project)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert nothing_is_left(project, run)
    hash_at_the_end(run)
    assert_all_read_once(run, NUM_PUBLIC + len(NODES) * NUM_PRIVATE)
