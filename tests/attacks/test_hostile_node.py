"""A node of a running fleet whose worker is another program: the others train on, and only it is lost."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from csdctl.runs.directory import ProjectDirectory, RunDirectory
from tests.emulated.running import document, emulated, refuse, succeed
from tests.emulated.small_jobs import dense_model, small_job
from tests.emulated.training import events_of

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]

JOB = small_job("epochs: 4, learning_rate: 0.01, loss: mean_squared_error", ".npz", data=("public",))
MODEL = dense_model(2, outputs=1, activation="linear")
PYTHON = """\
#!{python}
import os, sys
arguments = sys.argv[1:]
if {command!r} not in arguments:
    os.execv({python!r}, [{python!r}, *arguments])
worker = next(word for word in arguments if word.endswith(".pyz"))
sys.path.insert(0, worker)
sys.argv = arguments[arguments.index(worker):]
{code}
from csdctl.worker.__main__ import run
run()
"""
"""Program in the place of a node's Python, whose link or rank is changed by `code`."""

NUM_HONEST = 20
SENDS_VECTORS = """
import numpy as np
from csdctl.worker.group.channel import Letter
from csdctl.worker.group.link import RankEnd
honest, num_vectors = RankEnd.handle_local, 0
def handle_local(end, letter, content):
    global num_vectors
    if letter == Letter.VECTOR:
        num_vectors += 1
        if num_vectors > {num_honest}:
            np.frombuffer(end._vector, np.float32)[{element}] = {value}
    honest(end, letter, content)
RankEnd.handle_local = handle_local
"""


class Project:
    """An emulated fleet of a host and two nodes, and a small job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def hostile_fleet(self, command: str, code: str) -> Path:
        """Write a fleet file in which csd1's `command`, link or rank, is changed by `code`."""
        python = self.directory / "hostile-python"
        python.write_text(PYTHON.format(python=sys.executable, command=command, code=code))
        python.chmod(0o755)
        fleet = yaml.safe_load((self.directory / "fleet.yaml").read_text())
        next(node for node in fleet["nodes"] if node["name"] == "csd1")["python"] = str(python)
        path = self.directory / "hostile.yaml"
        path.write_text(yaml.safe_dump(fleet))
        shutil.copy(self.directory / "fleet.facts.json", self.directory / "hostile.facts.json")
        return path

    def send_vectors(self, element: int, value: str) -> Path:
        """Write a fleet file in which csd1 writes `value` into its vectors, after a number of honest ones."""
        code = SENDS_VECTORS.format(num_honest=NUM_HONEST, element=element, value=value)
        return self.hostile_fleet("link", code)

    def train(self, *arguments: str, code: int = 0) -> tuple[RunDirectory, str]:
        """Train; return the run and the output."""
        equal = () if "--resume" in arguments else ("--batch-size", "20")
        options = ("--skip-doctor", "--no-rebalance", *equal, *arguments)
        said = refuse(self.directory, "train", "job.yaml", *options, code=code)
        return RunDirectory(max((self.directory / ".csdctl" / "runs").iterdir())), said

    def in_memory(self, run: RunDirectory) -> Path:
        return ProjectDirectory(self.directory).step_file(run)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    files = {"job.yaml": JOB, "model.py": MODEL}
    with emulated(tmp_path_factory.mktemp("project"), 2, files) as directory:
        samples = np.random.default_rng(1).random((3000, 2)).astype(np.float32)
        np.savez(directory / "public.npz", x=samples, y=samples.sum(axis=1, keepdims=True))
        succeed(directory, "discover")
        succeed(directory, "prepare", "job.yaml")
        yield Project(directory)


@pytest.mark.attack(8)
def test_others_train_on_without_a_node_that_spoils_a_sum(project: Project) -> None:
    run, output = project.train("--fleet", str(project.send_vectors(0, "np.nan")))
    assert "not finite" in output
    assert {event["node"] for event in events_of(run.path, "NodeLost")} == {"csd1"}
    assert {event["node"] for event in events_of(run.path, "Finished")} >= {"host", "csd0"}
    report = document(project.directory, "report", run.run_id)
    assert (report["state"], report["num_unreadable"]) == ("completed", 0)
    assert set(report["lost_nodes"]) <= {"csd1"}
    assert report["loss"] < 1


@pytest.mark.attack(14)
@pytest.mark.attack(15)
def test_failed_run_leaves_nothing_in_memory_and_resumes(project: Project) -> None:
    """It asks all ranks to stop. What rank 0 writes, also in the resumed run, is for its user alone."""
    fleet = project.send_vectors(-3, "1")
    before = os.umask(0o022)
    try:
        run, output = project.train("--fleet", str(fleet), "--min-nodes", "2", code=1)
        assert "at least 2 must take part" in output
        assert f"--resume {run.run_id}" in output
        assert document(project.directory, "report", run.run_id)["state"] == "failed"
        assert not project.in_memory(run).exists()
        assert stat.S_IMODE(run.kept_step_file.stat().st_mode) == 0o600
        project.train("--resume", run.run_id)
    finally:
        os.umask(before)
    resumed = events_of(run.path, "Joined")[-1]
    assert resumed["total_steps"] >= NUM_HONEST
    assert not project.in_memory(run).exists()
    assert not run.kept_step_file.exists()
    written = [run.model, *(run.path / "checkpoints").iterdir(), run.path / "checkpoints"]
    assert len(written) >= 4
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in written}
    assert set(modes.values()) <= {"0o600", "0o700"}, modes


@pytest.mark.attack(14)
def test_run_that_fails_to_start_leaves_nothing_in_memory(project: Project) -> None:
    fleet = project.hostile_fleet("rank", "sys.exit(3)")
    run, _ = project.train("--fleet", str(fleet), "--exclude", "csd0", code=1)
    assert not project.in_memory(run).exists()
    assert not run.kept_step_file.exists()
