"""A node of a running fleet whose worker is another program: the others train on, and only it is lost."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

SENDS_VECTORS = """
import csdctl.worker.group.collective as collective, numpy as np
class Hostile(collective.Star):
    num_calls = -20
    def sum(self, on_wait, expected=None):
        self.num_calls += 1
        if self.num_calls > 0:
            np.frombuffer(self._local, np.float32)[{element}] = {value}
        super().sum(on_wait, expected)
collective.COLLECTIVES["star"] = Hostile
"""

WITHOUT_OTHERS = ("--exclude", "csd0")
"""Options of runs that end, with the host and the hostile node alone."""


class Project:
    """An emulated fleet of a host and two nodes, and a small job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        generator = np.random.default_rng(1)
        samples = generator.random((3000, 2)).astype(np.float32)
        np.savez(directory / "public.npz", x=samples, y=samples.sum(axis=1, keepdims=True))
        succeed(directory, "discover")
        succeed(directory, "prepare", "job.yaml")

    def make_hostile(self, command: str, code: str) -> Path:
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

    def train(self, *arguments: str, code: int = 0, collective: str = "star") -> tuple[RunDirectory, str]:
        """Train; return the run and the output."""
        equal = () if "--resume" in arguments else ("--batch-size", "20")
        options = ("--skip-doctor", "--collective", collective, *equal, *arguments)
        said = refuse(self.directory, "train", "job.yaml", *options, code=code)
        return self.latest, said

    def assert_others_finished(self, run: RunDirectory) -> None:
        """Assert that csd1 alone was lost, and that the others have trained to the end."""
        assert {event["node"] for event in events_of(run.path, "NodeLost")} == {"csd1"}
        assert set(finished(run)) == {"host", "csd0"}
        found = document(self.directory, "report", run.run_id)
        assert (found["state"], found["lost_nodes"], found["num_unreadable"]) == ("completed", ["csd1"], 0)
        assert found["loss"] < 1

    @property
    def latest(self) -> RunDirectory:
        return RunDirectory(max((self.directory / ".csdctl" / "runs").iterdir()))

    def in_memory(self, run: RunDirectory) -> Path:
        return ProjectDirectory(self.directory).step_file(run)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    files = {"job.yaml": JOB, "model.py": MODEL}
    with emulated(tmp_path_factory.mktemp("project"), 2, files) as directory:
        yield Project(directory)


def finished(run: RunDirectory) -> dict[str, dict[str, Any]]:
    return {event["node"]: event for event in events_of(run.path, "Finished")}


@pytest.mark.attack(8)
def test_others_train_on_without_a_node_that_spoils_a_sum(project: Project) -> None:
    code = SENDS_VECTORS.format(element=0, value="np.nan")
    run, output = project.train("--fleet", str(project.make_hostile("link", code)))
    assert "not finite" in output
    project.assert_others_finished(run)


@pytest.mark.attack(8)
def test_impossible_sum_of_an_allreduce_is_not_applied(project: Project) -> None:
    """Nobody sees single vectors: the run ends, and says how to find the node."""
    code = SENDS_VECTORS.format(element=-4, value="1e20")
    code = code.replace("collective.Star", "collective.Collective").replace('["star"]', '["allreduce"]')
    fleet = project.make_hostile("link", code)
    run, output = project.train("--fleet", str(fleet), *WITHOUT_OTHERS, code=1, collective="allreduce")
    assert "--collective star" in output
    assert not finished(run)


@pytest.mark.attack(14)
@pytest.mark.attack(15)
def test_failed_run_leaves_nothing_in_memory_and_resumes(project: Project) -> None:
    """It asks all ranks to stop. What rank 0 writes, also in the resumed run, is for its user alone."""
    code = SENDS_VECTORS.format(element=-3, value="1")
    fleet = project.make_hostile("link", code)
    before = os.umask(0o022)
    try:
        run, output = project.train("--fleet", str(fleet), "--min-nodes", "2", code=1)
        assert "--min-nodes is 2" in output
        assert f"--resume {run.run_id}" in output
        assert document(project.directory, "report", run.run_id)["state"] == "failed"
        assert not project.in_memory(run).exists()
        assert stat.S_IMODE(run.kept_step_file.stat().st_mode) == 0o600
        lost_at = max(event["step"] for event in events_of(run.path, "LinkLost"))
        project.train("--resume", run.run_id)
    finally:
        os.umask(before)
    resumed = events_of(run.path, "Joined")[-1]
    assert resumed["total_steps"] >= lost_at - 1 > 0
    assert not project.in_memory(run).exists()
    assert not run.kept_step_file.exists()
    written = [run.model, *(run.path / "checkpoints").iterdir(), run.path / "checkpoints"]
    assert len(written) >= 4
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in written}
    assert set(modes.values()) <= {"0o600", "0o700"}, modes


@pytest.mark.attack(14)
def test_run_that_fails_to_start_leaves_nothing_in_memory(project: Project) -> None:
    fleet = project.make_hostile("rank", "sys.exit(3)")
    run, _ = project.train("--fleet", str(fleet), *WITHOUT_OTHERS, code=1)
    assert not project.in_memory(run).exists()
    assert not run.kept_step_file.exists()
