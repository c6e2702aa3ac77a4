"""The rounds of tuning by fit with a scripted measurer, and what `tune` asks of the search."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.errors import OutOfMemoryError
from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import StepTime
from csdctl.tuning.fleet_model import ProbeOutcome, TrialResult
from csdctl.tuning.measurements import ForecastErrors
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT, Plan, RankPlan, load_plan, save_plan
from csdctl.tuning.plan_choice import confirmed_prediction
from csdctl.tuning.search import Limits
from csdctl.tuning.stannis import TuningError
from csdctl.worker.protocol.events import SumTimed
from csdctl.worker.protocol.model_info import CutInfo
from csdctl.worker.protocol.probe import CutTimes, PartTimes, ProbeRequest
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.tune import tune as tune_module
from csdctl.workflows.tune.tune import (
    MAX_OOM_RETRIES,
    SUM_BYTES,
    FitTuner,
    StrategyChooser,
    TunedFleet,
    TuneOptions,
)
from tests.fake_session import FakeSession
from tests.unit.workflows.measured_project import (
    PUBLIC,
    STEPS,
    SUMS,
    MeasuredProject,
    facts_of,
    make_project,
    measurements_of,
    prepared,
    run_context,
    workspace,
)

LIMITS = Limits(global_batch=160)
MAX_AT_ONCE = 100
"""More samples at once than this kill a rank, however little memory probes used."""
SUM_S = 0.02


def step_time_of(name: str) -> StepTime:
    return STEPS.get(name, STEPS["csd"])


def trial_of(ranks: Sequence[RankPlan], node_speedup: float = 1.0, step_factor: float = 1.0) -> TrialResult:
    """What the machines of the project reach, where nodes are faster than when they were probed."""
    host_s, *nodes_s = (step_time_of(rank.node).at(rank.batch_size) for rank in ranks)
    times = (host_s, *(seconds / node_speedup for seconds in nodes_s))
    step_s = (max(times) + SUM_S) * step_factor
    total = sum(rank.batch_size for rank in ranks)
    return TrialResult(5, step_s, total / step_s, times, 5 * step_s, SUM_S)


@dataclass
class ScriptedMeasurer:
    """Machines as functions; `trial` decides the result of a trial."""

    trial: Callable[[Sequence[RankPlan]], TrialResult] = trial_of
    gain: Mapping[Runtime, float] = field(default_factory=dict)
    """Settings that change the time of a step, by this factor."""
    num_probes: int = 0
    measuring_s: float = 0.0
    num_ranks: int = 3
    sum_s: Callable[[int, int], float] = SUMS.at
    sums: list[tuple[int, int]] = field(default_factory=list)
    rounds: list[Mapping[str, tuple[Runtime, ProbeRequest]]] = field(default_factory=list)
    trials: list[Sequence[RankPlan]] = field(default_factory=list)
    settings: dict[str, Runtime] = field(default_factory=dict)

    def time_sums(self, sum_bytes: Sequence[int], sum_ranks: Sequence[int]) -> list[SumTimed]:
        wanted = [(ranks, size) for ranks in (*sum_ranks, self.num_ranks) for size in sum_bytes]
        self.sums += wanted
        return [
            SumTimed(0, HOST_NAME, tuple(range(ranks)), size, self.sum_s(size, ranks))
            for ranks, size in wanted
        ]

    def measure(self, requests: Mapping[str, tuple[Runtime, ProbeRequest]]) -> dict[str, ProbeOutcome]:
        self.num_probes += len(requests)
        self.rounds.append(requests)
        return {name: self._outcome(name, *probe) for name, probe in requests.items()}

    def _outcome(self, name: str, settings: Runtime, request: ProbeRequest) -> ProbeOutcome:
        size = request.batch_size
        step_s = step_time_of(name).at(size) * self.gain.get(settings, 1.0)
        return ProbeOutcome(size, step_s, 3, {size: size << 20})

    def switch(self, settings: Mapping[str, Runtime]) -> None:
        self.settings |= settings

    def run_trial(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        self.trials.append(ranks)
        return self.trial(ranks)


def tune(
    at: MeasuredProject,
    measurer: ScriptedMeasurer,
    messages: list[str] | None = None,
    *,
    is_exploring: bool = False,
    limits: Limits = LIMITS,
) -> TunedFleet:
    measurements = measurements_of(at)
    lines: list[str] = [] if messages is None else messages
    tuner = FitTuner(measurer, measurements, limits, lines.append, is_exploring)
    return tuner.tune(measurements.recall_fleet())


def at_once(rank: RankPlan) -> int:
    return min(rank.batch_size, rank.micro_batch_size or rank.batch_size)


def test_first_tuning_times_sums_probes_every_class_and_tries_the_plan(at: MeasuredProject) -> None:
    measurer = ScriptedMeasurer()
    tuned = tune(at, measurer)
    vector_bytes = at.features.vector_bytes
    sizes = {vector_bytes, *(size for size in SUM_BYTES if size < vector_bytes)}
    assert set(measurer.sums) == {(num_ranks, size) for num_ranks in (2, 3) for size in sizes}
    assert {name for requests in measurer.rounds for name in requests} == {"host", "csd0", "csd1"}
    assert sum(tuned.tried.best.batch_sizes.values()) == LIMITS.global_batch
    assert 1 <= len(measurer.trials) <= 2
    assert not any(map(is_equal, measurer.trials)), "equal batch sizes would be slower"
    assert tuned.gain is None, "a gain that was not measured"


def test_sums_are_timed_once(at: MeasuredProject) -> None:
    tune(at, ScriptedMeasurer())
    again = ScriptedMeasurer()
    tune(at, again)
    assert again.sums == []


@pytest.mark.parametrize("factor", [0.5, 0.9])
def test_clearly_faster_settings_are_taken_and_kept(at: MeasuredProject, factor: float) -> None:
    usual = Runtime(facts_of("csd0").num_threads)
    expected = replace(usual, onednn=False) if factor == 0.5 else usual
    messages: list[str] = []
    measurer = ScriptedMeasurer(gain={replace(usual, onednn=False): factor})
    host, *nodes = tune(at, measurer, messages, is_exploring=True).tried.ranks
    assert host.onednn
    assert [rank.runtime for rank in nodes] == [expected] * 2
    assert any("takes 50% less time: selected" in line for line in messages) == (expected != usual)
    known = measurements_of(at).recall_fleet().class_of("csd1")
    assert known.settings == expected
    assert len(known.sizes) > 1
    again = ScriptedMeasurer(gain=measurer.gain)
    tune(at, again, is_exploring=True)
    assert again.num_probes == 0


@pytest.mark.parametrize("better", [0, 1])
def test_better_of_two_tried_plans_is_kept(at: MeasuredProject, better: int) -> None:
    """A trial that shows a slow node leads to a second plan, which may turn out to be worse."""

    def trial(ranks: Sequence[RankPlan]) -> TrialResult:
        result = trial_of(ranks)
        *others_s, slow_s = result.compute_s
        is_first = len(measurer.trials) == 1
        is_better = is_first == (better == 0)
        return replace(
            result,
            compute_s=(*others_s, 3 * slow_s) if is_first else result.compute_s,
            samples_per_s=result.samples_per_s * (2 if is_better else 1),
        )

    measurer = ScriptedMeasurer(trial)
    tuned = tune(at, measurer)
    assert len(measurer.trials) == 2 + better  # the second plan leaves a node out: all are tried too
    assert measurer.trials[0] != measurer.trials[1]
    assert tuned.tried.ranks == measurer.trials[better]


def test_rank_that_runs_out_of_memory_in_the_trial_computes_micro_batches(measured: MeasuredProject) -> None:
    messages: list[str] = []

    def trial(ranks: Sequence[RankPlan]) -> TrialResult:
        for rank in ranks:
            if at_once(rank) > MAX_AT_ONCE:
                raise OutOfMemoryError("killed", node=rank.node)
        return trial_of(ranks)

    tuned = tune(measured, ScriptedMeasurer(trial), messages)
    assert [line for line in messages if "did not fit in memory together with the other ranks" in line]
    for rank in tuned.tried.ranks:
        assert at_once(rank) <= MAX_AT_ONCE
    assert sum(rank.batch_size for rank in tuned.tried.ranks) == LIMITS.global_batch

    def fail(ranks: Sequence[RankPlan]) -> TrialResult:
        raise OutOfMemoryError("killed", node=ranks[0].node)

    measurer = ScriptedMeasurer(fail)
    with pytest.raises(OutOfMemoryError):
        tune(measured, measurer)
    assert len(measurer.trials) == 1 + MAX_OOM_RETRIES


def is_equal(ranks: Sequence[RankPlan]) -> bool:
    return len({rank.batch_size for rank in ranks}) == 1


def test_plan_that_loses_against_equal_batch_sizes_is_not_proposed(at: MeasuredProject) -> None:
    """The nodes, which were busy when they were probed, turn out to be faster in each trial."""

    def trial(ranks: Sequence[RankPlan]) -> TrialResult:
        return trial_of(ranks, node_speedup=3 if len(measurer.trials) == 1 else 20)

    measurer, messages = ScriptedMeasurer(trial), list[str]()
    tuned = tune(at, measurer, messages, limits=Limits(global_batch=159))
    assert [is_equal(ranks) for ranks in measurer.trials] == [False, False, True]
    assert {*tuned.tried.best.batch_sizes.values()} == {53}
    assert tuned.gain == 0.0
    assert "trying the best equal batch sizes" in messages


def test_equal_batch_sizes_within_the_range_of_their_forecast_are_measured(at: MeasuredProject) -> None:
    """They are predicted to be slower, by less than a forecast may be off; in a trial they are faster."""
    faster = 0.93 * STEPS["csd"].at(53) / STEPS["host"].at(53)

    def trial(ranks: Sequence[RankPlan]) -> TrialResult:
        return trial_of(ranks, faster, step_factor=0.9 if is_equal(ranks) else 1.0)

    measurer = ScriptedMeasurer(trial)
    tuned = tune(at, measurer, limits=Limits(global_batch=159))
    assert [is_equal(ranks) for ranks in measurer.trials] == [False, False, True]
    assert is_equal(tuned.tried.ranks)
    assert tuned.gain == 0.0


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_all_nodes_are_tried_before_some_are_left_out(at: MeasuredProject, factor: float) -> None:
    """By the model, sums take longer than nodes save; in the trial they take it only with a large factor."""

    def trial(ranks: Sequence[RankPlan]) -> TrialResult:
        return trial_of(ranks, step_factor=factor if len(ranks) > 1 else 1.0)

    measurer = ScriptedMeasurer(trial, sum_s=lambda _, num_ranks: 9.0 * (num_ranks - 1))
    tuned = tune(at, measurer)
    assert [len(ranks) for ranks in measurer.trials] == [1, 1, 3]
    is_left_out = factor > 1
    assert tuned.tried.best.left_out == (("csd0", "csd1") if is_left_out else ())
    assert (tuned.gain_without_nodes is not None and tuned.gain_without_nodes > 1) == is_left_out


def test_nodes_with_private_data_are_in_every_plan_and_public_data_limit_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Search:
        def __init__(self, *_: Any) -> None:
            pass

        def tune(self, model: Any) -> None:
            raise TuningError(f"{sorted(model.required)} {model.private_shares}")

    monkeypatch.setattr(tune_module, "FleetMeasurer", lambda *_: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(tune_module, "FitTuner", Search)
    at = make_project(tmp_path, num_nodes=3)
    data = prepared(at)
    data.num_private = {"csd1": 3 * PUBLIC.num_samples}
    space = workspace(at, {name: FakeSession(name) for name in at.fleet.machines})
    with pytest.raises(TuningError, match=r"\['csd1', 'host'\] {'csd1': 0.75}"):
        tune_module.tune_by_fit(run_context(at, space, data), TuneOptions())


def test_plan_of_a_split_has_the_memory_and_the_spread_of_its_own_trial(
    at: MeasuredProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = tune(at, ScriptedMeasurer())
    ranks = [rank.with_step(rank.batch_size, tuned.tried.compute_s[rank.node]) for rank in tuned.tried.ranks]
    predicted = confirmed_prediction(ranks, tuned.tried.result, ForecastErrors())
    plan = Plan(job="job", job_fingerprint="f", method="fit", predicted=predicted, ranks=ranks)
    cuts = (CutInfo("block", 1000, 25_000_000, 1_000_000), CutInfo("later", 500, 40_000_000, 1_500_000))
    data = prepared(at)
    data.model.info = replace(data.model.info, cuts=cuts)
    data.recipe, data.again_s = replace(data.recipe, epochs=2), 1.0
    space = workspace(at, {})
    space.opening_s = 1.0
    arguments = plan, tuned.model, tuned.limits, ForecastErrors(), 0.01, 20.0, 10.0
    chooser = StrategyChooser(TuneOptions(strategy=SPLIT), run_context(at, space, data), *arguments)
    times = PartTimes(
        0.1, 0.04, 0.0, (CutTimes("block", 0.02, 0.04, 0.04), CutTimes("later", 0.03, 0.05, 0.02))
    )
    found = chooser._forecast(times, "", cuts)
    chosen = chooser._choose(found)
    peaks = [(100 + rank) << 20 for rank in range(3)]

    def plan_after(error: float) -> Plan:
        result = replace(trial_of(plan.ranks), peak_memory_bytes=tuple(peaks), error=error)
        monkeypatch.setattr(tune_module, "run_trial", lambda *_, **__: (result, 1.0))
        path = tmp_path / "plan.yaml"
        save_plan(path, chooser._try_split(chosen, found, times))
        return load_plan(path)

    def widths(tried: Plan) -> dict[tuple[str, bool], float]:
        ranges = {
            (one.strategy, one.is_confirmed): one.first_run_s_range or (1, 1) for one in tried.strategies
        }
        return {key: high / low for key, (low, high) in ranges.items()}

    steady, uneven = plan_after(0.001), plan_after(0.2)
    assert steady.strategy == SPLIT
    assert [rank.peak_memory_bytes for rank in steady.ranks] == peaks
    whole = (DATA_PARALLEL, True)
    assert widths(steady)[whole] == pytest.approx(widths(uneven)[whole], rel=1e-3), "that of its own trial"
    assert 1 < widths(steady)[SPLIT, True] < widths(steady)[SPLIT, False] < widths(uneven)[SPLIT, True]
