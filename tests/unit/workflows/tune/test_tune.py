"""What `tune` adds to a plan, whatever made it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from csdctl.tuning.plan import Plan, Predicted, RankPlan
from csdctl.workflows.tune.tune import TuneOptions, tune
from tests.unit.workflows.measured_project import facts_of, make_project


def test_plan_keeps_the_batch_sizes_that_were_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr("csdctl.workflows.tune.fit.tune_by_fit", lambda *_: made)
    space = SimpleNamespace(fleet=at.fleet, facts={name: facts_of(name) for name in ("host", "csd0")})
    plan = tune(at.job, None, space, TuneOptions(), print, print)  # type: ignore[arg-type]
    assert plan.predicted
    assert plan.predicted.batch_sizes == [100, 10]
    assert plan.prediction == plan.predicted
