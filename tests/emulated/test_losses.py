"""What losses leave behind, on an emulated fleet with real SSH and MPI."""

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from csdctl.worker.protocol.processes import load_stat
from tests.emulated.running import csdctl, emulated, home_of
from tests.emulated.small_jobs import pausing_layer, save_arrays, small_job
from tests.emulated.training import (
    events_of,
    kill_host_rank,
    kill_rank,
    nothing_is_left,
    num_lines_with,
    of_fleet,
    processes,
    start_run,
)
from tests.patience import communicate, eventually, files_written, wait_for

pytestmark = pytest.mark.emulated

JOB = small_job("epochs: 100000, optimizer: adam, learning_rate: 0.01", data=("public",))
MODEL = f"""\
{pausing_layer(0.05, 'os.path.exists(os.path.expanduser("~/pause"))')}

def build():
    layers = [Pause(), keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""
OPTIONS = ("--batch-size", "16", "--min-nodes", "0", "--skip-doctor", "--no-rebalance")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    save_arrays(tmp_path / "public", 256, 8, 8, 1)
    with emulated(tmp_path, 1, {"model.py": MODEL, "job.yaml": JOB}, cpu=0.9):
        (home_of(tmp_path, "csd0") / "pause").touch()
        yield tmp_path


def open_in(pid: int) -> Counter[str]:
    """Count the descriptors, sockets among them, and threads of a process."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except OSError:  # closed meanwhile
            continue
    sockets = sum(link.startswith("socket:") for link in links)
    return Counter(descriptors=len(links), sockets=sockets, threads=len(os.listdir(f"/proc/{pid}/task")))


def kill_shell_of_csd0(project: Path, run: Path) -> None:
    """Kill the shell that has started csd0's rank. The rank goes on, and its exit code is lost."""
    (rank,) = of_fleet(processes("rank --spec", f"csdctl-run={run.name}/csd0"), project, "python", "csd0")
    stat = load_stat(rank)
    assert stat is not None
    os.kill(stat.parent, signal.SIGKILL)


@pytest.mark.fault(44)
@pytest.mark.fault(55)
def test_losses_leave_nothing_open_and_a_process_that_dies_when_all_is_done_is_a_warning(
    project: Path,
) -> None:
    process, run = start_run(project, *OPTIONS, until="EpochEnd")
    progress = partial(files_written, project)
    before = open_in(process.pid)
    for number, kill in enumerate([kill_rank("csd0"), kill_host_rank], 1):
        kill(project, run)
        wait_for(lambda number=number: num_lines_with("NodeBack", run) == number, process, project)
        wait_for(lambda: len(events_of(run, "Joined")[-1]["batch_sizes"]) == 2, process, project)
        ends = num_lines_with("EpochEnd", run)
        wait_for(lambda ends=ends: num_lines_with("EpochEnd", run) >= ends + 4, process, project)
    assert eventually(lambda: not open_in(process.pid) - before, progress), open_in(process.pid) - before
    kill_shell_of_csd0(project, run)
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process, project)
    assert process.returncode == 130, output
    assert re.search("warning: csd0: rank 1 .*killed.*, after the rank had finished", output)
    assert nothing_is_left(project, run)
    assert csdctl(project, "runs", "list", "--json").stdout.count('"stopped"') == 1
