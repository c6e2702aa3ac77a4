"""The run that measures a fleet, when another one takes its place, and the result of a trial."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import NodeError, OutOfMemoryError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import PrivateData
from csdctl.tuning.fleet_model import ProbeOutcome, TrialResult
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import EpochEnd, Event, Joined, Probed, Progress, SumTimed
from csdctl.worker.protocol.json_codec import RESULT, from_json, to_frame
from csdctl.worker.protocol.orders import Order, Probe, TakeSteps
from csdctl.worker.protocol.probe import ProbeRequest, ProbeResult, ProbeSpec
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import RunSpec, Runtime
from csdctl.workflows.tune import probing
from csdctl.workflows.tune.probing import FleetMeasurer, TuningRun, read_trial
from tests.fake_session import FakeSession
from tests.unit.runs.manifests import spec_of
from tests.unit.workflows.measured_project import (
    PUBLIC,
    MeasuredProject,
    make_project,
    prepared,
    run_context,
    workspace,
)

USUAL, OTHER = Runtime(4), Runtime(4, onednn=False)
MIB = 1 << 20
Peaks = Callable[[int], int]


class ScriptedRun:
    """In place of a TuningRun: every rank measures 0.1 s; `peak_of` a batch size is its memory in bytes."""

    runs: list["ScriptedRun"]
    peak_of: Peaks
    killed: tuple[str, int]
    culprit = ""

    def __init__(self, ranks: Sequence[RankPlan], context: object) -> None:
        self.ranks, self.start_s, self.has_ended = ranks, 5.0, False
        self.spec = spec_of([rank.node for rank in ranks])
        self.probes: list[Mapping[str, ProbeRequest]] = []
        self.num_trials = 0
        self.events: list[Event] = []
        self.runs.append(self)

    def __exit__(self, *_: object) -> None:
        self.has_ended = True

    def probe(self, requests: Mapping[str, ProbeRequest]) -> dict[str, Probed]:
        self.probes.append(requests)
        self.events = [Probed(0, HOST_NAME, 8, 0.1, 10, MIB)]
        if any((name, one.batch_size) == self.killed for name, one in requests.items()):
            if self.culprit:
                self.events = []
            killed, type(self).killed = self.killed, ("", 0)
            raise OutOfMemoryError("killed", node=self.culprit or killed[0])
        sizes = {name: request.batch_size for name, request in requests.items()}
        return {name: Probed(0, name, size, 0.1, 10, self.peak_of(size)) for name, size in sizes.items()}

    def take_steps(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        self.num_trials += 1
        if num_steps == 13:
            raise RunError("lost")
        return TrialResult(num_steps, 0.1, 100.0, (0.1,) * len(ranks), num_steps * 0.1, 0.0)


class Measured:
    """A host and a node with 1200 MiB, of which a rank may take 1080, that are measured by scripted runs."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        at = make_project(directory, num_nodes=1)
        result = to_frame(RESULT, ProbeResult(8, 0.2, 3, MIB))
        self.sessions = {
            name: FakeSession(name).on("python3", replies=lambda line: [result]) for name in at.fleet.machines
        }
        self.scripted = type("Scripted", (ScriptedRun,), {})
        self.scripted.runs, self.scripted.killed = [], ("", 0)
        self.scripted.peak_of = staticmethod(lambda size: size * 10 * MIB)
        monkeypatch.setattr(probing, "TuningRun", self.scripted)
        space = workspace(at, self.sessions, 1200 * MIB)
        self.measurer = FleetMeasurer(run_context(at, space), dict.fromkeys(self.sessions, USUAL))

    @property
    def runs(self) -> list[ScriptedRun]:
        return self.scripted.runs

    def probe(self, size: int = 8, **settings: Runtime) -> dict[str, ProbeOutcome]:
        request = ProbeRequest(size)
        return self.measurer.measure({name: (settings.get(name, USUAL), request) for name in self.sessions})

    def try_plan(self, num_steps: int = 5, **runtimes: Runtime) -> TrialResult:
        ranks = [
            RankPlan(node=name, batch_size=8, threads=one.threads, onednn=one.onednn)
            for name, one in runtimes.items()
        ]
        return self.measurer.run_trial(ranks, num_steps)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    fleet = Measured(tmp_path, monkeypatch)
    with fleet.measurer:
        yield fleet
    assert all(run.has_ended for run in fleet.runs)


def test_one_run_serves_probes_and_trials(fleet: Measured) -> None:
    fleet.probe()
    fleet.try_plan(host=USUAL, csd0=USUAL)
    fleet.probe(16)
    (run,) = fleet.runs
    assert (len(run.probes), run.num_trials) == (2, 1)
    assert (fleet.measurer.start_s, fleet.measurer.num_probes) == (5.0, 4)


def test_other_settings_are_measured_beside_the_run_until_they_are_selected(fleet: Measured) -> None:
    found = fleet.probe(csd0=OTHER)
    assert (found["host"].step_time_s, found["csd0"].step_time_s) == (0.1, 0.2)
    assert list(fleet.runs[0].probes[0]) == ["host"]
    (conversation,) = fleet.sessions["csd0"].conversations
    assert from_json(ProbeSpec, conversation.sent[0]).run.ranks[1].runtime == OTHER
    fleet.measurer.switch({"csd0": OTHER})
    fleet.probe(csd0=OTHER)
    first, second = fleet.runs
    assert first.has_ended
    assert [rank.runtime for rank in second.ranks] == [USUAL, OTHER]


def test_other_settings_are_not_measured_where_memory_is_short_for_two_models(fleet: Measured) -> None:
    for size in (30, 60):
        fleet.probe(size)
    assert fleet.probe(60, csd0=OTHER)["csd0"].step_time_s is None
    assert not fleet.sessions["csd0"].conversations


@pytest.mark.parametrize("runtimes", [{"host": USUAL}, {"host": USUAL, "csd0": OTHER}])
def test_plan_of_other_ranks_has_a_run_of_its_own(fleet: Measured, runtimes: dict[str, Runtime]) -> None:
    fleet.probe()
    fleet.try_plan(**runtimes)
    first, second = fleet.runs
    assert first.has_ended
    assert {rank.node: rank.runtime for rank in second.ranks} == runtimes


def test_machine_that_is_killed_for_memory_leaves_the_measurements_of_others(fleet: Measured) -> None:
    fleet.scripted.killed = ("csd0", 8)
    found = fleet.probe()
    assert (found["csd0"].step_time_s, found["csd0"].is_oom_kill) == (None, True)
    assert found["host"].step_time_s == 0.1
    assert [run.has_ended for run in fleet.runs] == [True, False]
    assert not fleet.runs[1].probes, "the host had been measured"


def test_process_that_is_killed_beside_a_rank_is_no_gain_and_no_error(fleet: Measured) -> None:
    fleet.sessions["csd0"].on("python3", exit_code=137)
    found = fleet.probe(csd0=OTHER)
    assert (found["csd0"].step_time_s, found["csd0"].is_oom_kill) == (None, False)
    assert len(fleet.runs) == 1


def test_rank_that_is_killed_by_the_process_beside_it_is_started_again(fleet: Measured) -> None:
    fleet.scripted.killed = (HOST_NAME, 8)
    fleet.scripted.culprit = "csd0"
    found = fleet.probe(csd0=OTHER)
    assert found["host"].step_time_s == 0.1
    assert [run.has_ended for run in fleet.runs] == [True, False]


def test_run_that_failed_in_a_trial_is_not_used_again(fleet: Measured) -> None:
    with pytest.raises(RunError, match="lost"):
        fleet.try_plan(13, host=USUAL, csd0=USUAL)
    fleet.probe()
    assert [run.has_ended for run in fleet.runs] == [True, False]


@pytest.mark.parametrize(
    ("peaks", "num_fitting"),
    [
        ({8: 700, 16: 900, 32: 0}, 2),  # not tried: 900 + 16 · 25 = 1300 MiB
        ({32: 1190, 16: 1190}, 2),  # above 90% of the memory, and yet it fitted
    ],
)
def test_size_that_is_predicted_not_to_fit_is_not_tried_unless_a_larger_one_did(
    fleet: Measured, peaks: dict[int, int], num_fitting: int
) -> None:
    fleet.scripted.peak_of = staticmethod(lambda size: peaks[size] * MIB)
    times = [fleet.probe(size)["csd0"].step_time_s for size in peaks]
    assert [bool(seconds) for seconds in times] == [number < num_fitting for number in range(len(peaks))]


def test_peak_of_the_process_is_not_recorded_for_a_smaller_size(fleet: Measured) -> None:
    peaks = {8: 700 * MIB, 16: 900 * MIB, 4: 900 * MIB}
    fleet.scripted.peak_of = staticmethod(lambda size: peaks[size])
    found = [fleet.probe(size)["csd0"].peaks for size in peaks]
    assert found[-1] == {8: 700 * MIB, 16: 900 * MIB}


def start_run(
    at: MeasuredProject,
    monkeypatch: pytest.MonkeyPatch,
    ranks: Sequence[RankPlan],
    answer: Callable[[Order], Sequence[Event]],
    **of_job: Any,
) -> tuple[TuningRun, list[RunSpec]]:
    """Start a run whose ranks send what `answer` returns; return it with its spec."""
    specs: list[RunSpec] = []

    def run_ranks(resolved: Any, spec: RunSpec, run: Any, options: Any, events: Any, **how: Any) -> str:
        specs.append(spec)
        events.emit(JOINED)
        while not isinstance(order := how["next_order"](), probing.Stop):
            for event in answer(order) if order else ():
                events.emit(event)
        return ""

    monkeypatch.setattr(probing, "run_ranks", run_ranks)
    data = prepared(at)
    data.private, data.num_private = {"csd0": PUBLIC}, {"csd0": 3_000}
    space = workspace(at, {rank.node: FakeSession(rank.node) for rank in ranks})
    return TuningRun(ranks, run_context(replace(at, job=replace(at.job, **of_job)), space, data)), specs


RANKS = [RankPlan(node=name, batch_size=10, threads=1) for name in (HOST_NAME, "csd0")]


@pytest.mark.parametrize("noise", [None, Noise(1.0, 1.1, 1e-5)])
def test_trial_adds_the_noise_of_the_job_to_its_private_share(
    at: MeasuredProject, monkeypatch: pytest.MonkeyPatch, noise: Noise | None
) -> None:
    orders: list[TakeSteps] = []

    def take_steps(order: Order) -> list[Event]:
        assert isinstance(order, TakeSteps)
        orders.append(order)
        return [epoch_end(0), epoch_end(1), *(Probed(rank, NODES[rank], 10, None, 0, MIB) for rank in (0, 1))]

    data = replace(at.job.data, private=PrivateData("/data/private", noise=noise))
    started, specs = start_run(at, monkeypatch, RANKS, take_steps, data=data)
    with started as run:
        run.take_steps(RANKS, 20)
    assert specs[0].noise == noise
    assert [rank.num_private for rank in specs[0].ranks] == [0, 1]
    host, csd0 = orders[0].ranks
    assert host.num_private == 0 < csd0.num_private
    assert csd0.num_private + csd0.num_public == 200


@pytest.mark.parametrize("wrong", [{"batch_size": 9}, {"step_time_s": 1e5}, {"rank": 0, "node": "host"}])
def test_measurement_that_was_not_asked_for_is_an_error_of_its_node(
    at: MeasuredProject, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    def answer(order: Order) -> list[Event]:
        assert isinstance(order, Probe)
        right = Probed(1, "csd0", 8, 0.1, 3, MIB)
        return [replace(right, **wrong), right]

    started, _ = start_run(at, monkeypatch, RANKS, answer)
    with started as run, pytest.raises(NodeError, match=r"measured .* samples, expected (8|nothing)"):
        run.probe({"csd0": ProbeRequest(8)})


def test_error_of_the_run_is_raised_by_whoever_waits_and_an_error_here_aborts_it(
    at: MeasuredProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(order: Order) -> list[Event]:
        raise RunError("lost csd0")

    started, _ = start_run(at, monkeypatch, RANKS, fail)
    with started as run:
        for _ in range(2):
            with pytest.raises(RunError, match="lost csd0"):
                run.probe({"csd0": ProbeRequest(8)})
    started, _ = start_run(at, monkeypatch, RANKS, lambda order: [])
    with pytest.raises(KeyError), started as run:
        raise KeyError
    with pytest.raises(KeyboardInterrupt):
        run.probe({"csd0": ProbeRequest(8)})


NODES = ("host", "csd0")


JOINED = Joined(0, "host", 1, 0, 20, 0, {"0": 30, "1": 10}, is_start=True)


def first_progress(rank: int) -> Progress:
    """Two slow steps."""
    return Progress(rank, NODES[rank], 1, 2, 2, 60, 1.0, 0.5, 1.5, 80 if rank == 0 else 0)


def epoch_end(rank: int, steps: int = 20) -> EpochEnd:
    """After the first two, steps of 0.1 s: the host computes for 0.09 s of it, the node for 0.08 s."""
    later = steps - 2
    compute_s = 1.0 + later * (0.09 if rank == 0 else 0.08)
    wait_s = 0.5 + later * (0.01 if rank == 0 else 0.02)
    samples = 40 * steps if rank == 0 else 0
    return EpochEnd(
        rank, NODES[rank], 1, steps, 0, compute_s, wait_s, 9.0, "", samples, stepped_samples=samples
    )


def test_first_steps_of_many_do_not_count_and_few_steps_all_count() -> None:
    events: list[Event] = [
        SumTimed(0, "host", (0, 1), 1 << 20, 0.02),
        *(first_progress(rank) for rank in (0, 1)),
        *(epoch_end(rank) for rank in (0, 1)),
        *(Probed(rank, NODES[rank], 8, None, 0, (1 + rank) << 20) for rank in (1, 0)),
    ]
    result = read_trial(events, NODES)
    assert result.peak_memory_bytes == (1 << 20, 2 << 20)
    assert (result.num_steps, result.step_s) == (18, pytest.approx(0.1))
    assert result.samples_per_s == pytest.approx(400)
    assert result.compute_s == pytest.approx((0.09, 0.08))
    assert (result.wall_s, result.sum_s) == (9.0, 0.02)
    few = [first_progress(0), epoch_end(0, 9), epoch_end(1, 9)]
    assert read_trial(few, NODES).num_steps == 9
    assert read_trial(few, NODES).peak_memory_bytes == (None, None)


def test_trial_that_lost_its_links_is_an_error() -> None:
    events: list[Event] = [replace(JOINED, is_start=False), epoch_end(0), epoch_end(1)]
    with pytest.raises(RunError, match="lost its links"):
        read_trial(events, NODES)


@pytest.mark.parametrize(
    "of_node",
    [
        [],
        [first_progress(1), epoch_end(1, 19)],
        [first_progress(1), replace(epoch_end(1), steps=0)],
        [first_progress(1), replace(epoch_end(1), compute_s=0.0)],
        [replace(first_progress(1), steps=21), epoch_end(1)],
        [replace(first_progress(1), compute_s=99.0), epoch_end(1)],
    ],
)
def test_node_with_missing_or_impossible_steps_is_named(of_node: list[Event]) -> None:
    with pytest.raises(RunError, match="before csd0 had done all steps"):
        read_trial([*of_node[:1], epoch_end(0), *of_node[1:]], NODES)
