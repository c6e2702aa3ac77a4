"""The strategy that `tune` chooses, and the plan with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.tuning.fleet_model import TrialResult
from csdctl.tuning.measurements import ForecastErrors
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT, Plan, load_plan, save_plan
from csdctl.tuning.plan_choice import confirmed_prediction
from csdctl.worker.protocol.model_info import CutInfo, CutTimes, PartTimes
from csdctl.workflows.tune import strategy_choice
from csdctl.workflows.tune.strategy_choice import StrategyChooser
from tests.unit.workflows.measured_project import MeasuredProject, prepared, run_context, workspace
from tests.unit.workflows.tune.test_rounds import ScriptedMeasurer, trial_of, tune

TIMES = PartTimes(0.1, 0.04, 0.0, (CutTimes("block", 0.02, 0.04, 0.04), CutTimes("later", 0.03, 0.05, 0.02)))
CUTS = (CutInfo("block", 1000, 25_000_000, 1_000_000), CutInfo("later", 500, 40_000_000, 1_500_000))


def test_plan_of_a_split_has_the_memory_and_the_spread_of_its_own_trial(
    at: MeasuredProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = tune(at, ScriptedMeasurer())
    tried = tuned.tried
    tuned = replace(tuned, tried=replace(tried, result=replace(tried.result, error=0.01)))
    ranks = [rank.with_step(rank.batch_size, tried.compute_s[rank.node]) for rank in tried.ranks]
    sizes = [rank.batch_size for rank in ranks]
    predicted = confirmed_prediction(sizes, tried.result, ForecastErrors(), None)
    plan = Plan(job="job", job_fingerprint="f", method="fit", predicted=predicted, ranks=ranks)
    data = prepared(at)
    data.model.info = replace(data.model.info, cuts=CUTS)
    data.recipe, data.again_s = replace(data.recipe, epochs=2), 1.0
    space = workspace(at, {})
    space.opening_s = 1.0
    chooser = StrategyChooser(
        SPLIT, "", run_context(at, space, data), plan, tuned=tuned, errors=ForecastErrors(), process_s=10.0
    )
    monkeypatch.setattr(strategy_choice, "worker_on", lambda *_: ())
    monkeypatch.setattr(strategy_choice, "call_worker", lambda *_, **__: TIMES)
    peaks = tuple((100 + rank) << 20 for rank in range(3))

    def plan_after(error: float) -> Plan:
        def trial(*_: object, **__: object) -> tuple[TrialResult, float]:
            return replace(trial_of(plan.ranks), peak_memory_bytes=peaks, error=error), 1.0

        monkeypatch.setattr(strategy_choice, "run_trial", trial)
        path = tmp_path / "plan.yaml"
        save_plan(path, chooser.choose())
        return load_plan(path)

    def widths(tried: Plan) -> dict[tuple[str, bool], float]:
        ranges = {
            (forecast.strategy, forecast.is_confirmed): forecast.first_run_s_range or (1, 1)
            for forecast in tried.strategies
        }
        return {key: high / low for key, (low, high) in ranges.items()}

    steady, uneven = plan_after(0.001), plan_after(0.2)
    assert steady.strategy == SPLIT
    assert [rank.peak_memory_bytes for rank in steady.ranks] == [*peaks]
    whole = (DATA_PARALLEL, True)
    assert widths(steady)[whole] == pytest.approx(widths(uneven)[whole], rel=1e-3), "its own trial"
    assert 1 < widths(steady)[SPLIT, True] < widths(steady)[SPLIT, False] < widths(uneven)[SPLIT, True]
