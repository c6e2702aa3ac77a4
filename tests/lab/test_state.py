"""FAULT 36: files written by csdctl are damaged. (37 is in test_main_job.)"""

import re
from pathlib import Path

import pytest

from csdctl.fleet.facts import facts_path, load_facts
from csdctl.fleet.fleet_file import load_fleet
from tests.lab.project import Project

pytestmark = [pytest.mark.lab, pytest.mark.first(1)]


@pytest.mark.fault(36)
@pytest.mark.parametrize("damage", ["cut short", "of another schema"])
def test_damaged_facts_are_reported_set_aside_and_collected_again(project: Project, damage: str) -> None:
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
def test_truncated_plan_is_refused_with_a_remedy(project: Project, job: Path) -> None:
    project.use(project.lab.near[0])
    (project.path / ".csdctl" / "plans").mkdir(parents=True)
    (project.path / ".csdctl" / "plans" / "job.yaml").write_text("schema: 1\njob_finger")
    done = project.csdctl("train", str(job))
    assert done.returncode == 2, done.stderr
    assert "plans/job.yaml" in done.stderr
