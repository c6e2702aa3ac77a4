"""A node of a running fleet whose worker is another program: the others train on, and only it is lost."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from csdctl.runs.directory import ProjectDirectory, RunDirectory
from tests.attacks.hostile_link import RUN_COMMAND
from tests.emulated.running import csdctl
from tests.emulated.training import events_of
from tests.patience import scaled

pytestmark = [pytest.mark.emulated, pytest.mark.first(1)]

JOB = """\
model: model.py:build
data:
  public: {path: public.npz}
recipe: {epochs: 4, learning_rate: 0.01, loss: mean_squared_error}
"""
MODEL = """\
import keras


def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
"""
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
"""In the place of a node's Python: the worker's link or rank, changed by `code`."""

SENDS_PICKLES = (
    RUN_COMMAND
    + """
import pickle
import csdctl.worker.group.link as link
honest = link.allgather
link.allgather = lambda world, _, **more: honest(world, Command(pickle.dumps(Command())), 1 << 40, **more)
"""
)
SENDS_VECTORS = """
import csdctl.worker.group.collective as collective, numpy as np
class Hostile(collective.Star):
    num_sums = -20
    def sum(self, on_wait, expected=None):
        self.num_sums += 1
        if self.num_sums > 0:
            np.frombuffer(self._local, np.float32)[{element}] = {value}
        super().sum(on_wait, expected)
collective.COLLECTIVES["star"] = Hostile
"""
CLAIMS_STEPS = """
import dataclasses
import csdctl.worker.tasks.session as session
class Ahead(session.RankSession):
    def _synchronize(self, group):
        weights = self._task.variables[0]
        weights.assign(weights.value * 0 + 666.0)
        self._progress.position = dataclasses.replace(self._progress.position, total_steps=10**6)
        super()._synchronize(group)
session.RankSession = Ahead
"""


WITHOUT_OTHERS = ("--exclude", "csd0")
"""Where the run ends: only the host and the hostile node."""


class Project:
    """An emulated fleet of a host and two nodes, and a small job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "job.yaml").write_text(JOB)
        (directory / "model.py").write_text(MODEL)
        generator = np.random.default_rng(1)
        samples = generator.random((3000, 2)).astype(np.float32)
        np.savez(directory / "public.npz", x=samples, y=samples.sum(axis=1, keepdims=True))
        self.run("emulate", "up", "--nodes", "2", "--cpu", "1")
        self.run("discover")
        self.run("prepare", "job.yaml")

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = csdctl(self.directory, *arguments)
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
        assert "Traceback" not in done.stdout + done.stderr
        return done

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
        done = self.run(
            *("train", "job.yaml", "--skip-doctor", "--collective", collective),
            *(() if "--resume" in arguments else ("--batch-size", "20")),
            *arguments,
            code=code,
        )
        return self.latest, done.stdout + done.stderr

    @property
    def latest(self) -> RunDirectory:
        return RunDirectory(max((self.directory / ".csdctl" / "runs").iterdir()))

    def in_memory(self, run: RunDirectory) -> Path:
        return ProjectDirectory(self.directory).step_file(run)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    started = Project(tmp_path_factory.mktemp("project"))
    yield started
    csdctl(started.directory, "emulate", "down")


def lost_nodes(run: RunDirectory) -> set[str]:
    return {event["node"] for event in events_of(run.path, "NodeLost")}


def finished(run: RunDirectory) -> dict[str, dict[str, Any]]:
    return {event["node"]: event for event in events_of(run.path, "Finished")}


@pytest.mark.thorough
@pytest.mark.attack(1)
def test_node_that_sends_pickles_fails_the_first_group_and_is_named(project: Project) -> None:
    marker = project.directory / "marker"
    fleet = project.make_hostile("link", "import os\n" + SENDS_PICKLES.replace("{marker}", str(marker)))
    _, output = project.train("--fleet", str(fleet), *WITHOUT_OTHERS, code=1)
    assert "csd1: sent " in output
    assert not marker.exists()


@pytest.mark.thorough
@pytest.mark.attack(1)
def test_doctor_names_the_node_that_sends_pickles(project: Project) -> None:
    marker = project.directory / "marker"
    code = "import os\n" + SENDS_PICKLES.replace("group.link as link", "tasks.mpi_check as link")
    code = code.replace("lambda world, _, **more:", "lambda world, _:").replace(", **more)", ")")
    fleet = project.make_hostile("mpi-check", code.replace("{marker}", str(marker)))
    done = project.run("doctor", "--fleet", str(fleet), code=1)
    assert "csd1: sent " in done.stdout.replace("\n", " ")
    assert not marker.exists()


@pytest.mark.thorough
@pytest.mark.attack(8)
@pytest.mark.parametrize(
    ("element", "value", "words"),
    [
        (0, "np.nan", "not finite"),
        pytest.param(-5, "1e20", "samples, expected 20", marks=pytest.mark.thorough),
        pytest.param(-4, "1", "asked all ranks to stop", marks=pytest.mark.thorough),
    ],
)
def test_others_train_on_without_a_node_that_spoils_a_sum(
    project: Project, element: int, value: str, words: str
) -> None:
    code = SENDS_VECTORS.format(element=element, value=value)
    run, output = project.train("--fleet", str(project.make_hostile("link", code)))
    assert lost_nodes(run) == {"csd1"}
    assert words in output
    assert set(finished(run)) == {"host", "csd0"}
    document = json.loads(project.run("report", run.run_id, "--json").stdout)
    assert (document["state"], document["lost_nodes"]) == ("done", ["csd1"])
    assert document["loss"] < 1


@pytest.mark.thorough
@pytest.mark.attack(8)
@pytest.mark.parametrize(
    ("element", "value"), [(-4, "1e20"), pytest.param(-3, "1", marks=pytest.mark.thorough)]
)
def test_impossible_sum_of_an_allreduce_is_not_applied(project: Project, element: int, value: str) -> None:
    """Nobody sees single vectors: the run ends, and says how to find the node."""
    code = SENDS_VECTORS.replace("collective.Star", "collective.Allreduce").replace(
        '["star"]', '["allreduce"]'
    )
    fleet = project.make_hostile("link", code.format(element=element, value=value))
    run, output = project.train("--fleet", str(fleet), *WITHOUT_OTHERS, code=1, collective="allreduce")
    assert "--collective star" in output
    assert not finished(run)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("self._world.start_send(bytes(5), 0, 1); time.sleep(3600)", id="a short chunk"),
        pytest.param("time.sleep(3600)", id="nothing"),
    ],
)
def test_node_that_sends_nothing_or_too_little_hangs_nobody(project: Project, code: str) -> None:
    hostile = SENDS_VECTORS.partition("np.frombuffer")[0] + f"import time; {code}\n"
    hostile += '        super().sum(on_wait, expected)\ncollective.COLLECTIVES["star"] = Hostile\n'
    fleet = project.make_hostile("link", hostile)
    run, output = project.train("--fleet", str(fleet), "--silence-deadline", f"{scaled(25):.0f}")
    assert lost_nodes(run) == {"csd1"}
    assert "csd1" in output
    assert ("sent 5 bytes" if "bytes(5)" in code else "sent the other ranks nothing") in output
    assert set(finished(run)) == {"host", "csd0"}


@pytest.mark.thorough
def test_node_that_claims_a_million_steps_gets_the_hosts_state(project: Project) -> None:
    run, _ = project.train("--fleet", str(project.make_hostile("rank", CLAIMS_STEPS)))
    done = finished(run)
    assert set(done) == {"host", "csd0", "csd1"}
    assert len({event["weights_hash"] for event in done.values()}) == 1
    assert {event["steps"] for event in done.values()} == {4 * 50}
    document = json.loads(project.run("report", run.run_id, "--json").stdout)
    assert document["loss"] < 1, "the weights are those of the training, not 666"


@pytest.mark.thorough
@pytest.mark.attack(14)
@pytest.mark.attack(15)
def test_failed_run_leaves_nothing_in_memory_and_resumes(project: Project) -> None:
    """It asks all ranks to stop. What rank 0 writes, also in the resumed run, is for its user alone."""
    code = SENDS_VECTORS.format(element=-3, value="1")
    fleet = project.make_hostile("link", code)
    before = os.umask(0o022)
    try:
        run, output = project.train("--fleet", str(fleet), *WITHOUT_OTHERS, code=1)
        assert f"--resume {run.run_id}" in output
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


@pytest.mark.thorough
@pytest.mark.attack(14)
def test_run_that_fails_to_start_leaves_nothing_in_memory(project: Project) -> None:
    fleet = project.make_hostile("rank", "sys.exit(3)")
    run, _ = project.train("--fleet", str(fleet), *WITHOUT_OTHERS, code=1)
    assert not project.in_memory(run).exists()
    assert not run.kept_step_file.exists()
