"""A run without a terminal: detached, hung up on, watched, listed and stopped from elsewhere."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.emulated.running import CSDCTL, csdctl, document, emulated, succeed
from tests.emulated.small_jobs import save_arrays, small_job
from tests.emulated.training import num_lines_with
from tests.lab.test_main_job import PAUSING
from tests.patience import communicate, eventually, files_written, run_command

JOB = small_job("epochs: 100000, optimizer: sgd, learning_rate: 0.001, metrics: [accuracy]", data=("public",))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("runs")
    save_arrays(directory / "public", 512, 8, 8, 1, num_classes=2)
    with emulated(directory, 1, {"model.py": PAUSING, "job.yaml": JOB}, cpu=0.5):
        yield directory


def runs(project: Path) -> dict[str, dict[str, Any]]:
    return {run["run_id"]: run for run in document(project, "runs", "list")["runs"]}


def test_detached_run_outlives_its_terminal_and_is_found_watched_and_stopped(project: Path) -> None:
    # A session of its own, whose end sends a hang-up to all in it, as a terminal or a login does.
    command = [str(CSDCTL), "train", "--batch-size", "64", "--skip-doctor", "--detach", "--json"]
    login = run_command(["setsid", "--wait", *command], cwd=project)
    assert login.returncode == 0, login.stderr
    run_id = json.loads(login.stdout)["run"]
    run = project / ".csdctl" / "runs" / run_id
    os.kill(json.loads((run / "process.json").read_text())["pid"], signal.SIGHUP)
    # The list takes a second of a core: it is asked when the events of both ranks have the epoch.
    ends, progress = partial(num_lines_with, "EpochEnd", run), partial(files_written, project)
    assert eventually(lambda: ends() >= 4 and runs(project)[run_id]["epoch"] >= 2, progress)
    assert runs(project)[run_id]["state"] == "running"

    second = csdctl(project, "train", "--batch-size", "64", "--skip-doctor")
    assert (second.returncode, "another csdctl is running" in second.stderr) == (6, True)

    watcher = subprocess.Popen(
        [str(CSDCTL), "runs", "watch", "--json"], cwd=project, stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None
    seen = (json.loads(line) for line in watcher.stdout)
    assert next(event for event in seen if event["event"] == "EpochEnd")["epoch"] >= 1
    frozen = subprocess.Popen([str(CSDCTL), "runs", "watch"], cwd=project, stdout=subprocess.DEVNULL)
    os.kill(frozen.pid, signal.SIGSTOP)
    epoch, before = runs(project)[run_id]["epoch"], ends()
    assert eventually(lambda: ends() >= before + 6 and runs(project)[run_id]["epoch"] >= epoch + 3, progress)
    frozen.kill()
    frozen.wait()

    stopped = csdctl(project, "runs", "stop", run_id[: len("20261123-0")])
    assert (stopped.returncode, "stopped, at epoch" in stopped.stdout) == (0, True), stopped.stdout
    assert f"--resume {run_id}" in stopped.stdout
    communicate(watcher, project)
    assert watcher.returncode == 0
    output = csdctl(project, "runs", "logs", run_id, "csdctl").stdout
    assert "stopped; the state of the last completed step is kept" in output


@pytest.mark.thorough
def test_hang_up_of_a_run_with_a_terminal_stops_it_in_order(project: Path) -> None:
    command = [str(CSDCTL), "train", "--batch-size", "64", "--skip-doctor"]
    before = set(runs(project))
    with subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL, text=True) as train:
        assert eventually(
            lambda: any(run["epoch"] >= 2 for run_id, run in runs(project).items() if run_id not in before),
            partial(files_written, project),
        )
        train.send_signal(signal.SIGHUP)
        communicate(train, project)
        assert train.returncode == 130
    (run_id,) = set(runs(project)) - before
    assert runs(project)[run_id]["state"] == "stopped"
    succeed(project, "runs", "rm", min(before), "--yes")
    assert set(runs(project)) == {run_id}
