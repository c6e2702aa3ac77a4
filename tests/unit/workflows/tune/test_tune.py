"""What `tune` adds to every plan, whatever the method."""

from pathlib import Path

from csdctl.tuning.plan import Plan, Predicted, RankPlan
from csdctl.workflows.tune.tune import complete_plan
from tests.unit.workflows.measured_project import facts_of, make_project


def test_plan_keeps_the_batch_sizes_that_were_tried(tmp_path: Path) -> None:
    at = make_project(tmp_path, num_nodes=1)
    made = Plan(
        job=at.job.name,
        job_fingerprint=at.job.fingerprint(),
        method="fit",
        predicted=Predicted(
            global_batch=110,
            step_s=1.0,
            samples_per_s=110.0,
            compute_share=1.0,
            imbalance_share=0.0,
            communication_share=0.0,
            is_confirmed=True,
        ),
        ranks=[
            RankPlan(node="host", batch_size=100, threads=2),
            RankPlan(node="csd0", batch_size=10, threads=1),
        ],
    )
    plan = complete_plan(made, at.job, {name: facts_of(name) for name in ("host", "csd0")})
    assert plan.predicted
    assert plan.predicted.batch_sizes == [100, 10]
    assert plan.prediction == plan.predicted
    assert plan.made_for
    assert set(plan.made_for.machines) == {"host", "csd0"}
