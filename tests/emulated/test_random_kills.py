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

from tests.emulated.running import emulated, home_of
from tests.emulated.small_jobs import pausing_layer, small_job
from tests.emulated.training import (
    assert_all_read_once,
    events_of,
    hash_at_the_end,
    nothing_is_left,
    of_fleet,
    processes,
    processes_of,
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
MODEL = f"""\
{pausing_layer(0.05)}

def build():
    layers = [Pause(), keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""


def write_samples(path: Path, count: int) -> None:
    generator = np.random.default_rng(count)
    pictures = generator.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    np.savez(path, x=pictures, y=np.arange(count) % 3)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    with emulated(tmp_path, len(NODES), {"job.yaml": JOB, "model.py": MODEL}):
        write_samples(tmp_path / "public.npz", NUM_PUBLIC)
        for node in NODES:
            write_samples(home_of(tmp_path, node) / "private.npz", NUM_PRIVATE)
        yield tmp_path


def targets(project: Path, run: Path) -> dict[str, Callable[[], list[int]]]:
    """Return how to find the processes of each kind."""

    def on_nodes(*words: str) -> list[int]:
        return [pid for node in NODES for pid in processes_of(run, node, "python", *words)]

    def ranks_of_host() -> list[int]:
        return processes_of(run, "host", "python", " rank --spec")

    return {
        "rank": lambda: on_nodes(" rank --spec"),
        "end of a link on a node": lambda: on_nodes(" link --rank"),
        "end of a link on the host": lambda: processes_of(run, "host", "python", " link --rank"),
        "mpirun": lambda: processes_of(run, "", "prterun"),
        "daemon": lambda: of_fleet(processes("prted"), project, "prted"),
        "hub": lambda: processes_of(run, "host", "python", " hub "),
        "rank 0": ranks_of_host,
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
