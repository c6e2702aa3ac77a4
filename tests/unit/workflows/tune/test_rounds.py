"""The rounds of tuning by fit, with scripted machines, and what they ask of the machines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.errors import OutOfMemoryError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import StepTime
from csdctl.tuning.fleet_model import TrialResult
from csdctl.tuning.measurements import ProbeOutcome
from csdctl.tuning.plan import RankPlan
from csdctl.tuning.plan_choice import TunedFleet
from csdctl.tuning.search import Limits
from csdctl.tuning.stannis import TuningError
from csdctl.worker.protocol.events import Probed, SumTimed
from csdctl.worker.protocol.orders import ProbeRequest
from csdctl.workflows.tune import rounds
from csdctl.workflows.tune import tune as tune_module
from csdctl.workflows.tune.rounds import MAX_OOM_RETRIES, SUM_BYTES, FitTuner, FleetMeasurer
from csdctl.workflows.workspace.event_stream import EventStream, Message
from tests.fake_session import FakeSession
from tests.unit.workflows import measured_project
from tests.unit.workflows.measured_project import PUBLIC, STEPS, SUMS, MeasuredProject, run_context, workspace

MIB = 1 << 20


class ScriptedRun:
    """In place of a TuningRun: every rank measures 0.1 s. `peak_of` a batch size is its memory in bytes."""

    runs: list["ScriptedRun"]
    peak_of: Callable[[int], int]
    killed: tuple[str, int]

    def __init__(self, ranks: Sequence[RankPlan], context: object) -> None:
        self.ranks, self.start_s, self.has_ended = ranks, 5.0, False
        self.probes: list[Mapping[str, ProbeRequest]] = []
        self.num_trials = 0
        self.probed: list[Probed] = []
        self.runs.append(self)

    def __exit__(self, *_: object) -> None:
        self.has_ended = True

    def probe(self, requests: Mapping[str, ProbeRequest]) -> list[Probed]:
        self.probes.append(requests)
        sizes = {name: request.batch_size for name, request in requests.items()}
        is_killed = self.killed in sizes.items()
        self.probed = [
            Probed(0, name, size, 0.1, 10, self.peak_of(size))
            for name, size in sizes.items()
            if not is_killed or name != self.killed[0]
        ]
        if is_killed:
            raise OutOfMemoryError("killed", node=self.killed[0])
        return self.probed

    def take_steps(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        self.num_trials += 1
        if num_steps == 13:
            raise RunError("lost")
        return TrialResult(0.1, 100.0, (0.1,) * len(ranks), 0.0)


class MeasuredFleet:
    """A host and a node with 1200 MiB, of which a rank may take 1080, that are measured by scripted runs."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        at = measured_project.make_project(directory, num_nodes=1)
        sessions = {name: FakeSession(name) for name in at.fleet.machines}
        self.scripted = type("Scripted", (ScriptedRun,), {})
        self.scripted.runs, self.scripted.killed = [], ("", 0)
        self.scripted.peak_of = staticmethod(lambda size: size * 10 * MIB)
        monkeypatch.setattr(rounds, "TuningRun", self.scripted)
        self.measurer = FleetMeasurer(run_context(at, workspace(at, sessions, 1200 * MIB)))

    @property
    def runs(self) -> list[ScriptedRun]:
        return self.scripted.runs

    def probe(self, size: int = 8) -> dict[str, ProbeOutcome]:
        return self.measurer.measure({name: ProbeRequest(size) for name in ("host", "csd0")})

    def try_plan(self, *names: str, num_steps: int = 5) -> TrialResult:
        ranks = [RankPlan(node=name, batch_size=8, threads=4) for name in names]
        return self.measurer.run_trial(ranks, num_steps)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasuredFleet]:
    fleet = MeasuredFleet(tmp_path, monkeypatch)
    with fleet.measurer:
        yield fleet
    assert all(run.has_ended for run in fleet.runs)


def test_run_serves_probes_and_trials_until_one_fails_or_has_other_ranks(fleet: MeasuredFleet) -> None:
    fleet.probe()
    fleet.try_plan("host", "csd0")
    fleet.probe(16)
    (run,) = fleet.runs
    assert (len(run.probes), run.num_trials) == (2, 1)
    assert (fleet.measurer.start_s, fleet.measurer.num_probes) == (5.0, 4)
    fleet.try_plan("host")
    assert [rank.node for rank in fleet.runs[1].ranks] == ["host"]
    with pytest.raises(RunError, match="lost"):
        fleet.try_plan("host", num_steps=13)
    fleet.probe()
    assert [run.has_ended for run in fleet.runs] == [True, True, False]


def test_machine_that_is_killed_for_memory_leaves_the_measurements_of_others(fleet: MeasuredFleet) -> None:
    fleet.scripted.killed = ("csd0", 8)
    outcomes = fleet.probe()
    assert (outcomes["csd0"].step_time_s, outcomes["csd0"].is_oom_kill) == (None, True)
    assert outcomes["host"].step_time_s == 0.1
    assert [run.has_ended for run in fleet.runs] == [True, False]
    assert not fleet.runs[1].probes, "the host had been measured"


@pytest.mark.parametrize(
    ("peaks", "num_fitting"),
    [
        ({8: 700, 16: 900, 32: 0}, 2),  # not tried: 900 + 16 · 25 = 1300 MiB
        ({32: 1190, 16: 1190}, 2),  # above 90% of the memory, and yet it fitted
    ],
)
def test_size_that_is_predicted_not_to_fit_is_not_tried_unless_a_larger_one_did(
    fleet: MeasuredFleet, peaks: dict[int, int], num_fitting: int
) -> None:
    fleet.scripted.peak_of = staticmethod(lambda size: peaks[size] * MIB)
    times = [fleet.probe(size)["csd0"].step_time_s for size in peaks]
    assert [bool(seconds) for seconds in times] == [number < num_fitting for number in range(len(peaks))]


def test_peak_of_the_process_is_not_recorded_for_a_smaller_size(fleet: MeasuredFleet) -> None:
    peaks = {8: 700 * MIB, 16: 900 * MIB, 4: 900 * MIB}
    fleet.scripted.peak_of = staticmethod(lambda size: peaks[size])
    outcomes = [fleet.probe(size)["csd0"] for size in peaks]
    assert [outcome.peak_memory_bytes for outcome in outcomes] == [700 * MIB, 900 * MIB, 0]


LIMITS = Limits(global_batch=160)
MAX_AT_ONCE = 100
"""More samples at once than this kill a rank, however little memory probes used."""
SUM_S = 0.02


def step_time_of(name: str) -> StepTime:
    return STEPS.get(name, STEPS["csd"])


def trial_of(ranks: Sequence[RankPlan]) -> TrialResult:
    """What the machines of the project reach."""
    times = tuple(step_time_of(rank.node).at(rank.batch_size) for rank in ranks)
    step_s = max(times) + SUM_S
    total = sum(rank.batch_size for rank in ranks)
    return TrialResult(step_s, total / step_s, times, SUM_S)


@dataclass
class ScriptedMeasurer:
    """Machines as functions. `trial` decides the result of a trial."""

    trial: Callable[[Sequence[RankPlan]], TrialResult] = trial_of
    num_probes: int = 0
    num_ranks: int = 3
    moved_share: float = 0.0
    """The part of the host's batch that balancing moves to the first node."""
    sums: list[tuple[int, int]] = field(default_factory=list)
    rounds: list[Mapping[str, ProbeRequest]] = field(default_factory=list)
    trials: list[Sequence[RankPlan]] = field(default_factory=list)

    def time_sums(self, sum_bytes: Sequence[int], sum_ranks: Sequence[int]) -> list[SumTimed]:
        sums = [(ranks, size) for ranks in (*sum_ranks, self.num_ranks) for size in sum_bytes]
        self.sums += sums
        return [
            SumTimed(0, HOST_NAME, tuple(range(ranks)), size, SUMS.at(size, ranks)) for ranks, size in sums
        ]

    def measure(self, requests: Mapping[str, ProbeRequest]) -> dict[str, ProbeOutcome]:
        self.num_probes += len(requests)
        self.rounds.append(requests)
        sizes = {name: request.batch_size for name, request in requests.items()}
        return {
            name: ProbeOutcome(size, step_time_of(name).at(size), size << 20) for name, size in sizes.items()
        }

    def run_trial(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        self.trials.append(ranks)
        return self.trial(ranks)

    def balance(self, ranks: Sequence[RankPlan], num_steps: int) -> list[int]:
        host, *nodes = (rank.batch_size for rank in ranks)
        moved = round(host * self.moved_share)
        return [host - moved, nodes[0] + moved, *nodes[1:]]


def tune(at: MeasuredProject, measurer: ScriptedMeasurer, messages: list[str] | None = None) -> TunedFleet:
    def take(event: object) -> None:
        if messages is not None and isinstance(event, Message):
            messages.append(event.text)

    measurements = measured_project.measurements_of(at)
    context = replace(run_context(at, workspace(at, {})), events=EventStream((take,)))
    tuner = FitTuner(context, measurer, measurements, LIMITS)
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
    again = ScriptedMeasurer()
    tune(at, again)
    assert again.sums == []


def test_batch_sizes_that_steps_of_all_ranks_have_balanced_are_tried_and_planned(
    at: MeasuredProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MIN_BALANCING_STEPS", 1)
    planned = tune(at, ScriptedMeasurer()).tried.best.batch_sizes
    measurer = ScriptedMeasurer(moved_share=0.1)
    balanced = tune(at, measurer).tried
    assert [rank.batch_size for rank in measurer.trials[0]] == [*balanced.best.batch_sizes.values()]
    assert balanced.best.batch_sizes["host"] < planned["host"]
    assert sum(balanced.best.batch_sizes.values()) == sum(planned.values())


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
    assert len(measurer.trials) == 2
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


def test_nodes_with_private_data_are_in_every_plan_and_public_data_limit_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Search:
        def __init__(self, *_: Any, **options: Any) -> None:
            pass

        def tune(self, model: Any) -> None:
            raise TuningError(f"{sorted(model.required)} {model.private_shares}")

    monkeypatch.setattr(tune_module, "FleetMeasurer", lambda *_, **__: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(tune_module, "FitTuner", Search)
    at = measured_project.make_project(tmp_path, num_nodes=3)
    data = measured_project.prepared(at)
    data.num_private = {"csd1": 3 * PUBLIC.num_samples}
    space = workspace(at, {name: FakeSession(name) for name in at.fleet.machines})
    with pytest.raises(TuningError, match=r"\['csd1', 'host'\] {'csd1': 0.75}"):
        tune_module.tune_by_fit(run_context(at, space, data), tune_module.TuneOptions())


def test_host_that_did_not_train_takes_part_in_the_sum_of_the_newest_trial(at: MeasuredProject) -> None:
    measured_project.remember_probes(at)
    measured_project.remember_trial(at, (0, 16, 16))
    measurements = measured_project.measurements_of(at, is_host_training=False)
    model = replace(measurements.recall_fleet(), collective_cost=SUMS)
    assert measurements.recall_overhead(model) == pytest.approx(measured_project.OVERHEAD_FACTOR)
