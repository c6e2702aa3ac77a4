"""Choosing the plan: the job's own, another file, or one batch size on every rank."""

from pathlib import Path

import pytest

from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet, Host, Node
from csdctl.job.model import Job
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from csdctl.workflows.train.plan import build_equal_plan, default_runtime, resolve_plan
from csdctl.workflows.workspace.workspace import Workspace

FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")))
FACTS = {name: Facts(name, num_cores=4) for name in (HOST_NAME, "csd0", "csd1")}


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    project = ProjectDirectory(tmp_path)
    return Workspace(project, FLEET, FACTS, {}, Ledger(project.ledger, "train"))


def make_plan(job: Job, *nodes: str, left_out: tuple[str, ...] = ()) -> Plan:
    ranks = [RankPlan(node=name, batch_size=8, threads=4) for name in (HOST_NAME, *nodes)]
    return Plan(
        job=job.name,
        job_fingerprint=job.fingerprint(),
        method="fit",
        left_out=list(left_out),
        ranks=ranks,
    )


def test_left_out_nodes_are_reported(job: Job, space: Workspace, tmp_path: Path) -> None:
    save_plan(tmp_path / "other.yaml", make_plan(job, "csd0", left_out=("csd1",)))
    messages: list[str] = []
    plan = resolve_plan(job, space, messages.append, path=tmp_path / "other.yaml")
    assert [rank.node for rank in plan.ranks] == [HOST_NAME, "csd0"]
    assert messages == ["the plan leaves out csd1: training is faster without them"]


def test_batch_size_replaces_the_plan(job: Job, space: Workspace) -> None:
    plan = resolve_plan(job, space, pytest.fail, batch_size=32)
    assert plan == build_equal_plan(job, FLEET, FACTS, 32)
    assert [(rank.node, rank.batch_size) for rank in plan.ranks] == [
        (HOST_NAME, 32),
        ("csd0", 32),
        ("csd1", 32),
    ]


def test_threads_of_the_host_come_from_the_fleet_file() -> None:
    fleet = Fleet(FLEET.nodes, host=Host(threads=2))
    assert default_runtime(HOST_NAME, fleet, FACTS).threads == 2
    assert default_runtime("csd0", fleet, FACTS).threads == FACTS["csd0"].num_threads
    assert default_runtime("csd9", fleet, FACTS).threads == 1
