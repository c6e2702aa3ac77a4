"""What losses, kills and damaged files leave behind and cost, on an emulated fleet with real SSH and MPI."""

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from csdctl.worker.protocol.processes import load_stat
from tests.emulated.running import csdctl, emulated, succeed
from tests.emulated.small_jobs import pausing_layer, save_arrays, small_job
from tests.emulated.training import (
    events_of,
    hash_at_the_end,
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

JOB = small_job("epochs: 3, optimizer: adam, learning_rate: 0.01", data=("public",))
MODEL = f"""\
{pausing_layer(0.05, 'os.path.exists(os.path.expanduser("~/pause"))')}

def build():
    layers = [Pause(), keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""
OPTIONS = ("--skip-doctor", "--no-rebalance")
NEW = (*OPTIONS, "--batch-size", "16")
NUM_STEPS = 8
"""Of an epoch: 256 samples in batches of 16 on two ranks."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("losses")
    save_arrays(directory / "public", 2 * 16 * NUM_STEPS, 8, 8, 1)
    files = {"model.py": MODEL, "job.yaml": JOB, "long.yaml": JOB.replace("epochs: 3", "epochs: 100000")}
    with emulated(directory, 1, files, cpu=0.9):
        pause = directory / ".csdctl/emulated/nodes/csd0/home/pause"
        pause.touch()
        yield directory


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


def kill_shell_of(node: str) -> Callable[[Path, Path], None]:
    """Kill the shell that has started a node's rank, which goes on, and whose exit code is lost."""

    def kill(project: Path, run: Path) -> None:
        marked = processes("rank --spec", f"csdctl-run={run.name}/{node}")
        (rank,) = of_fleet(marked, project, "python", node)
        stat = load_stat(rank)
        assert stat is not None
        os.kill(stat.parent, signal.SIGKILL)

    return kill


@pytest.mark.fault(44)
@pytest.mark.fault(55)
def test_losses_leave_nothing_open_and_a_process_that_dies_when_all_is_done_is_a_warning(
    project: Path,
) -> None:
    process, run = start_run(project, "long.yaml", *NEW, "--min-nodes", "0", until="EpochEnd")
    progress = partial(files_written, project)
    before = open_in(process.pid)
    for number, kill in enumerate([kill_rank("csd0"), kill_host_rank], 1):
        kill(project, run)
        wait_for(lambda number=number: num_lines_with("NodeBack", run) == number, process, project)
        wait_for(lambda: len(events_of(run, "Joined")[-1]["batch_sizes"]) == 2, process, project)
        ends = num_lines_with("EpochEnd", run)
        wait_for(lambda ends=ends: num_lines_with("EpochEnd", run) >= ends + 4, process, project)
    assert eventually(lambda: not open_in(process.pid) - before, progress), open_in(process.pid) - before
    kill_shell_of("csd0")(project, run)
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process, project)
    assert process.returncode == 130, output
    assert re.search("warning: csd0: rank 1 .*killed.*, after the rank had finished", output)
    assert nothing_is_left(project, run)
    assert csdctl(project, "runs", "list", "--json").stdout.count('"stopped"') == 1


@pytest.mark.thorough
@pytest.mark.fault(53)
def test_damage_of_the_state_is_named_with_its_cost_and_changes_no_weight(project: Path) -> None:
    """The newest checkpoint and the state of the last step; then all that was saved."""
    succeed(project, "train", *NEW)
    undisturbed = max((project / ".csdctl/runs").iterdir())
    process, run = start_run(project, *NEW, until="EpochEnd")
    wait_for(lambda: num_lines_with('"EpochEnd","rank":0,"node":"host","epoch":2', run), process, project)
    process.send_signal(signal.SIGINT)
    communicate(process, project)
    num_done = events_of(run, "Finished")[0]["steps"]
    kept, checkpoints = run / "step.state", sorted((run / "checkpoints").glob("*.npz"))
    for path in (kept, *checkpoints[1:]):
        content = bytearray(path.read_bytes())
        for place in range(1000, len(content), 1000):
            content[place] ^= 1
        path.write_bytes(content)
    said = succeed(project, "train", *OPTIONS, "--resume", "latest").stdout
    damaged = [f"{path.relative_to(project)} is damaged: " for path in (kept, *checkpoints[1:])]
    assert [text in said for text in damaged] == [True] * len(damaged)
    assert f"{num_done - NUM_STEPS} steps are repeated" in said
    assert hash_at_the_end_of(run) == hash_at_the_end(undisturbed)
    shutil.rmtree(run / "checkpoints")
    with (run / "events.jsonl").open("r+") as file:  # as if it had been stopped again
        lines = file.readlines()
        file.seek(0)
        file.truncate()
        file.writelines(line for line in lines if '"Finished"' not in line)
    refused = csdctl(project, "train", *OPTIONS, "--resume", "latest")
    assert (refused.returncode, "no state of run" in refused.stderr + refused.stdout) == (2, True)


def hash_at_the_end_of(run: Path) -> str:
    """Return the hash of the weights with which the two ranks have finished last."""
    (found,) = {event["weights_hash"] for event in events_of(run, "Finished")[-2:]}
    return str(found)
