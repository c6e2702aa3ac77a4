"""Choosing the plan, and rejecting one that no longer fits, with a list of the changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts, facts_path, save_facts
from csdctl.fleet.model import HOST_NAME, Fleet, Host, Node
from csdctl.job.model import Job, load_job
from csdctl.tuning.plan import STRATEGIES, Plan, RankPlan, StrategyPlan, load_plan, save_plan
from csdctl.workflows.train import plan as plans
from csdctl.workflows.train.plan import build_equal_plan, check_plan, default_runtime, load_fitting_plan
from csdctl.workflows.train.request import TrainOptions, TrainRequest
from csdctl.workflows.train.train import check_files

JOB = """\
model: mine.py:build
data: {public: {path: data}}
recipe: {epochs: 3, learning_rate: 0.1}
"""
FLEET = Fleet((Node("csd0", "10.1.1.2"), Node("csd1", "10.1.1.3")))
FACTS = {
    name: Facts(name, architecture="aarch64", cpu_model="Cortex-A53", num_cores=4, memory_bytes=6 << 30)
    for name in (HOST_NAME, "csd0", "csd1")
}


def test_left_out_nodes_are_reported_and_not_contacted(plan: Plan, job: Job, tmp_path: Path) -> None:
    smaller = plan.model_copy(update={"ranks": plan.ranks[:2], "left_out": ["csd1"]})
    save_plan(tmp_path / "other.yaml", smaller)
    messages: list[str] = []
    request = TrainRequest(job, FLEET, tmp_path, TrainOptions(), tmp_path / "other.yaml")
    fleet, planned = check_files(request, messages.append)
    assert (fleet.machines, planned) == ((HOST_NAME, "csd0"), smaller)
    assert messages == ["the plan leaves out csd1: training is faster without them"]


def test_rank_that_is_not_selected_is_left_out(plan: Plan, job: Job, tmp_path: Path) -> None:
    save_plan(tmp_path / "all.yaml", plan)
    messages: list[str] = []
    smaller = replace(FLEET, nodes=FLEET.nodes[:1])
    fitting = load_fitting_plan(tmp_path / "all.yaml", job, smaller, messages.append)
    assert (fitting.ranks, fitting.predicted) == (plan.ranks[:2], None)
    assert messages == ["csd1 left out of the plan; others keep their batch sizes until you tune"]


def test_plan_is_judged_by_the_facts_that_discover_saved(plan: Plan, job: Job, tmp_path: Path) -> None:
    save_plan(tmp_path / "all.yaml", plan)
    fleet = replace(FLEET, path=tmp_path / "fleet.yaml")
    assert load_fitting_plan(tmp_path / "all.yaml", job, fleet) == plan
    save_facts(fleet, {**FACTS, "csd1": replace(FACTS["csd1"], num_cores=2)})
    with pytest.raises(InputError, match="csd1: "):
        load_fitting_plan(tmp_path / "all.yaml", job, fleet)
    save_facts(fleet, {**FACTS, "csd1": Facts("csd1", problem="port 22 is closed")})
    assert load_fitting_plan(tmp_path / "all.yaml", job, fleet) == plan
    facts_path(fleet).write_text("damaged")
    assert load_fitting_plan(tmp_path / "all.yaml", job, fleet) == plan


def test_batch_size_replaces_the_plan(job: Job, tmp_path: Path) -> None:
    request = TrainRequest(job, FLEET, tmp_path, TrainOptions(), batch_size=32)
    assert check_files(request, pytest.fail) == (FLEET, None)
    plan = build_equal_plan(job, FLEET, FACTS, 32)
    assert [(rank.node, rank.batch_size) for rank in plan.ranks] == [(name, 32) for name in FACTS]


def test_host_of_which_the_fleet_file_says_so_does_not_train(plan: Plan, job: Job) -> None:
    fleet = replace(FLEET, host=Host(trains=False))
    assert build_equal_plan(job, fleet, FACTS, 32).batch_sizes == [0, 32, 32]
    with pytest.raises(
        InputError, match=r"the plan trains on the host, but fleet\.yaml says it does not train"
    ):
        check_plan(plan, job, fleet, FACTS)


def test_threads_of_the_host_come_from_the_fleet_file() -> None:
    fleet = Fleet(FLEET.nodes, host=Host(threads=2))
    assert default_runtime(HOST_NAME, fleet, FACTS).threads == 2
    assert default_runtime("csd0", fleet, FACTS).threads == FACTS["csd0"].num_threads
    assert default_runtime("csd9", fleet, FACTS).threads == 1


def test_device_of_a_rank_comes_from_the_fleet_file_and_a_change_needs_a_new_plan(job: Job) -> None:
    facts = {**FACTS, "csd0": replace(FACTS["csd0"], accelerator="NVIDIA L4", has_cuda=True)}
    plan = build_equal_plan(job, FLEET, facts, 32)
    assert [rank.runtime.device for rank in plan.ranks] == ["cpu", "auto", "cpu"]
    assert plan.for_host_alone().ranks[0].runtime.device == "cpu"
    check_plan(plan, job, FLEET, facts)
    hidden = replace(FLEET, nodes=(replace(FLEET.nodes[0], device="cpu"), FLEET.nodes[1]))
    with pytest.raises(InputError, match="csd0: device cpu, was auto when tuned"):
        check_plan(plan, job, hidden, facts)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    return written(tmp_path, JOB)


@pytest.fixture
def plan(job: Job, tmp_path: Path) -> Plan:
    """A plan as loaded from its file."""
    ranks = [RankPlan(node=name, batch_size=8, threads=4) for name in FACTS]
    made = Plan(job="job", job_fingerprint=job.fingerprint(), method="fit", ranks=ranks)
    made_for = plans.build_fingerprint(made, job, FACTS)
    save_plan(tmp_path / "plan.yaml", made.model_copy(update={"made_for": made_for}))
    return load_plan(tmp_path / "plan.yaml")


def written(directory: Path, text: str) -> Job:
    (directory / "job.yaml").write_text(text)
    return load_job(directory / "job.yaml")


def refusal(plan: Plan, job: Job, facts: dict[str, Facts] = FACTS) -> str:
    with pytest.raises(InputError) as raised:
        check_plan(plan, job, FLEET, facts)
    assert "csdctl tune" in raised.value.remedy
    return raised.value.message


def test_changed_values_and_model_file_of_the_job_are_listed(plan: Plan, job: Job, tmp_path: Path) -> None:
    changed = written(tmp_path, JOB.replace("epochs: 3", "epochs: 5"))
    check_plan(plan, changed, FLEET, FACTS)
    changed = written(tmp_path, JOB.replace("epochs: 3", "epochs: 5, optimizer: adam"))
    compared = [StrategyPlan(strategy=name, first_run_s=9.0) for name in STRATEGIES[:2]]
    assert refusal(plan.model_copy(update={"strategies": compared}), changed) == (
        f"the plan no longer fits {changed.path}; changed since tuning:"
        "\n  recipe.epochs: 5, was 3 when tuned\n  recipe.optimizer: adam, was not set when tuned"
    )
    (tmp_path / "mine.py").write_text("def build(): return 1\n")
    assert refusal(plan, job).endswith("\n  mine.py has changed")


def test_changed_machine_is_named_with_the_difference(plan: Plan, job: Job) -> None:
    slower = {**FACTS, "csd1": replace(FACTS["csd1"], num_cores=2)}
    message = refusal(plan, job, slower)
    assert "\n  csd1: " in message
    assert "2 cores" in message.partition(", was ")[0]
    check_plan(plan, job, FLEET, {"host": FACTS["host"]})  # without facts, nothing is known to have changed


def test_manually_written_plan_is_judged_by_its_job_fingerprint(plan: Plan, job: Job, tmp_path: Path) -> None:
    manual = plan.model_copy(update={"made_for": None})
    slower = {name: replace(facts, num_cores=1) for name, facts in FACTS.items()}
    check_plan(manual, job, FLEET, slower)
    changed = written(tmp_path, JOB.replace("epochs: 3", "epochs: 5"))
    assert refusal(manual, changed).endswith("changed since tuning:\n  job, model or recipe")


def test_node_missing_from_the_plan_is_named(plan: Plan, job: Job) -> None:
    smaller = plan.model_copy(update={"ranks": plan.ranks[:2]})
    with pytest.raises(InputError, match="does not include csd1") as raised:
        check_plan(smaller, job, FLEET, FACTS)
    assert "exclude csd1" in str(raised.value)
