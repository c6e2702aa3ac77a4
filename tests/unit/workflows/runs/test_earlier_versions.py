"""A project of an earlier version, at another path and on another machine, is read as it was written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.cli.app import run_command
from csdctl.documents import load_kept
from csdctl.fleet.model import Fleet, Node
from csdctl.job.model import load_job
from csdctl.runs.directory import LATEST, ProjectDirectory, RunDirectory
from csdctl.runs.ledger import read_ledger
from csdctl.runs.measurements import MeasurementStore
from csdctl.terminal.streams import Streams
from csdctl.tuning.plan import load_plan
from csdctl.workflows.data.prepare import PreparedData
from csdctl.workflows.runs.manage import list_runs
from csdctl.workflows.train.resume import find_resumable, is_complete, load_spec
from tests.earlier_projects import ARCHIVES, unpack


@pytest.fixture(params=ARCHIVES, ids=lambda archive: archive.name)
def project(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ProjectDirectory:
    directory = unpack(request.param, tmp_path)
    monkeypatch.chdir(directory)
    return ProjectDirectory(directory)


@pytest.fixture
def said() -> list[str]:
    return []


def test_runs_are_listed_and_reported(
    project: ProjectDirectory, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The csdctl that was killed is on another machine: whether it trains cannot be known here."""
    finished, killed = list_runs(project, said.append)
    assert said == []
    assert (finished.state, finished.epoch, finished.epochs, finished.num_ranks) == ("completed", 2, 2, 2)
    assert (killed.state, killed.epochs, killed.num_ranks) == ("running", 1000, 2)
    RunDirectory(project.runs / killed.run_id).process.unlink()
    assert list_runs(project, said.append)[1].state == "interrupted"
    assert run_command(["report", finished.run_id, killed.run_id, "--json"], Streams()) == 0
    for report, epochs in zip(json.loads(capsys.readouterr().out)["runs"], (2, 2), strict=True):
        assert report["epochs"] == epochs
        assert report["num_unreadable"] == 0
        assert report["identical_weights"]
    assert run_command(["report", finished.run_id, "--html", "report.html"], Streams()) == 0
    assert run_command(["report", "--privacy", "--json"], Streams()) == 0


def test_plan_data_measurements_and_ledger_are_read(project: ProjectDirectory, said: list[str]) -> None:
    job = load_job(project.root / "job.yaml")
    assert load_plan(project.plan(job.name)).job == job.name
    prepared = load_kept(project.prepared(job.name), PreparedData)
    assert prepared is not None
    assert prepared.num_samples == 96
    MeasurementStore(project.measurements, said.append)
    assert list(read_ledger(project.ledger, said.append))
    assert said == []


def test_run_that_was_killed_can_be_resumed_and_the_finished_one_is_complete(
    project: ProjectDirectory, said: list[str]
) -> None:
    job, fleet = load_job(project.root / "job.yaml"), Fleet((Node("csd0", "192.0.2.1"),))
    finished, _ = (RunDirectory(project.runs / run_id) for run_id in project.run_ids())
    run = find_resumable(project, LATEST, job, fleet, said.append)
    assert said == []
    assert load_spec(run).recipe.epochs == job.recipe.epochs
    assert not is_complete(run, job)
    assert is_complete(finished, replace(job, recipe=replace(job.recipe, epochs=2)))
