"""A new task is one file and its registration: a task that counts samples, in a group that loses a node.

The package is copied, the task's file added and one line written into the table of tasks; csdctl then
packs, ships and runs this worker over real SSH and MPI.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csdctl as package
from tests.emulated.running import emulated, home_of, succeed
from tests.emulated.small_jobs import dense_model, small_job
from tests.emulated.training import of_fleet, processes

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

NUM_PUBLIC, NUM_PRIVATE = 6000, 900
JOB = small_job("epochs: 1, learning_rate: 0.1, loss: mean_squared_error", ".npz")
MODEL = dense_model(2, outputs=1, activation="linear")
REGISTRATION = '    "count": "csdctl.worker.tasks.count:Count",\n'
PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
from csdctl.fleet.fleet_file import load_fleet
from csdctl.job.model import load_job
from csdctl.supervision.run_setup import Patience
from csdctl.worker.protocol.events import event_to_line
from csdctl.worker.protocol.run_spec import TaskSpec
from csdctl.workflows.data.prepare import prepare_job
from csdctl.workflows.train.request import TrainOptions
from csdctl.workflows.train.spec import RunContext, build_spec
from csdctl.workflows.train.strategies import Strategy
from csdctl.workflows.train.train import resolve_run
from csdctl.workflows.train.plan import build_equal_plan
from csdctl.workflows.train.run import run_ranks
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.worker.protocol.events import Event
from csdctl.workflows.workspace.workspace import open_workspace

def show(event):
    if isinstance(event, Event):
        print(event_to_line(event), flush=True)

job, fleet = load_job(Path("job.yaml")), load_fleet(Path("fleet.yaml"))
with open_workspace(Path.cwd(), fleet, "train", is_locking=True) as space:
    prepared = prepare_job(job, space, lambda line: None)
    plan = build_equal_plan(job, fleet, space.facts, 20)
    run = space.project.new_scratch()
    context = RunContext(job, prepared, space, EventStream())
    resolved = resolve_run(plan.ranks, Strategy(), context)
    task = TaskSpec("count", {"halted": "csd1"})
    resolved = replace(resolved, data=replace(resolved.data, validation=None), task=task)
    options = TrainOptions(deadlines=Patience(max_restarts=0))  # restarted at once, csd1 would join again
    spec = build_spec(resolved, run, options, num_checkpoints=3)
    run_ranks(resolved, spec, run, options, EventStream((show,)))
"""


def save_samples(path: Path, count: int) -> None:
    np.savez(path, x=np.zeros((count, 2), np.float32), y=np.zeros((count, 1), np.float32))


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    with emulated(tmp_path, 2, {"job.yaml": JOB, "model.py": MODEL}):
        save_samples(tmp_path / "public.npz", NUM_PUBLIC)
        for node in ("csd0", "csd1"):
            save_samples(home_of(tmp_path, node) / "private.npz", NUM_PRIVATE)
        succeed(tmp_path, "discover")
        yield tmp_path


def test_new_task_runs_in_a_group_that_loses_a_node(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(package.__file__).parent, site / "csdctl")
    tasks = site / "csdctl" / "worker" / "tasks"
    shutil.copy(Path(__file__).with_name("count_task.py"), tasks / "count.py")
    registry = tasks / "session.py"
    before, opening, after = registry.read_text().partition("TASKS = {\n")
    assert opening, "session.py has no table of tasks"
    registry.write_text(before + opening + REGISTRATION + after)
    events: list[dict[str, Any]] = []
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        for line in running.stdout:
            events.append(json.loads(line.removeprefix("@csdctl ")))
            if events[-1]["event"] == "Joined" and events[-1]["is_start"]:
                (rank,) = of_fleet(processes("rank --spec", "/csd1"), project, "python", "csd1")
                os.kill(rank, signal.SIGKILL)
        errors = running.stderr.read()
    assert running.returncode == 0, errors
    assert [event["node"] for event in events if event["event"] == "NodeLost"] == ["csd1"]
    ended = {event["node"]: event for event in events if event["event"] == "EpochEnd"}
    assert set(ended) == {"host", "csd0"}
    (without,) = [event for event in events if event["event"] == "Joined" and event["lost"]]
    total = ended["host"]["global_samples"] + without["num_lost"]
    assert total == NUM_PUBLIC + 2 * NUM_PRIVATE, "the lost node's private samples are reported"
    assert ended["host"]["samples"] == ended["host"]["global_samples"], "the sum over MPI is the schedule's"
    for event in ended.values():
        # All public samples, csd0's private ones, and those that csd1 had read before it was lost.
        assert NUM_PUBLIC + NUM_PRIVATE <= event["samples"] < NUM_PUBLIC + 2 * NUM_PRIVATE
    assert len({event["samples"] for event in ended.values()}) == 1
