"""FAULTS 36 and 37: what csdctl wrote itself is damaged, or what a person wrote changes in between."""

import re
from pathlib import Path

import pytest

from csdctl.fleet.facts import facts_path, load_facts
from csdctl.fleet.model import load_fleet
from tests.lab.project import Project

pytestmark = pytest.mark.lab


@pytest.mark.fault(36)
@pytest.mark.parametrize("damage", ["cut short", "of another schema"])
def test_damaged_facts_are_said_kept_aside_and_learnt_again(project: Project, damage: str) -> None:
    project.use(project.lab.near[0])
    assert project.discover()[0] == 0
    fleet = load_fleet(project.path / "fleet.yaml")
    path = facts_path(fleet)
    text = path.read_text()
    path.write_text(text[: len(text) // 2] if damage == "cut short" else '{"schema": "csdctl.facts/0"}')
    damaged = path.read_text()
    code, machines, errors = project.discover()
    assert (code, machines["csd0"]["problem"]) == (0, None), errors
    assert re.search(r"warning: .*facts\.json.* is kept as ", errors)
    assert damaged in [other.read_text() for other in path.parent.glob("fleet.facts*") if other != path]
    assert set(load_facts(fleet)) == {"host", "csd0"}


@pytest.mark.fault(36)
def test_half_a_plan_is_refused_with_a_remedy(project: Project, job: Path) -> None:
    project.use(project.lab.near[0])
    (project.path / ".csdctl" / "plans").mkdir(parents=True)
    (project.path / ".csdctl" / "plans" / "job.yaml").write_text("schema: 1\njob_finger")
    done = project.csdctl("train", str(job))
    assert done.returncode == 2, done.stderr
    assert "plans/job.yaml" in done.stderr


@pytest.mark.fault(37)
def test_job_or_fleet_that_changed_after_tuning_is_noticed(project: Project, job: Path) -> None:
    one, two = project.lab.near[:2]
    project.use(one, two)
    project.write_fleet(one)
    done = project.csdctl("tune", str(job), "--probe-seconds", "0.1")
    assert done.returncode == 0, done.stderr
    project.write_fleet(one, two)
    done = project.csdctl("train", str(job))
    assert done.returncode == 2, done.stderr
    assert "the plan has nothing for csd1" in done.stderr
    edited = job.with_name("edited.yaml")
    edited.write_text(job.read_text().replace("0.01", "0.02"))
    project.write_fleet(one)
    plan = project.path / ".csdctl" / "plans" / "job.yaml"
    done = project.csdctl("train", str(edited), "--plan", str(plan))
    assert done.returncode == 2, done.stderr
    assert "changed since tuning" in done.stderr
