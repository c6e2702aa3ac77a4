"""What `tune` asks of the search, and what it adds to every plan."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.tuning.plan import Plan, Predicted, RankPlan
from csdctl.tuning.stannis import TuningError
from csdctl.workflows.tune import tune
from csdctl.workflows.tune.tune import TuneOptions, complete_plan
from tests.fake_session import FakeSession
from tests.unit.workflows.measured_project import PUBLIC, facts_of, make_project, prepared, workspace


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


def test_nodes_with_private_data_are_in_every_plan_and_public_data_limit_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Search:
        def __init__(self, *_: Any) -> None:
            pass

        def tune(self, model: Any) -> None:
            raise TuningError(f"{sorted(model.required)} {model.max_host_share:.2f}")

    monkeypatch.setattr(tune, "FleetMeasurer", lambda *_: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(tune, "FitTuner", Search)
    at = make_project(tmp_path, num_nodes=3)
    data = prepared(at)
    data.private = {"csd1": replace(PUBLIC, num_samples=3 * PUBLIC.num_samples)}
    space = workspace(at, {name: FakeSession(name) for name in at.fleet.machines})
    with pytest.raises(TuningError, match=r"\['csd1', 'host'\] 0.25"):
        tune.tune_by_fit(at.job, data, space, TuneOptions(), lambda line: None, None)  # type: ignore[arg-type]
