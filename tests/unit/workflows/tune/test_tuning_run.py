"""The run that measures a fleet, and the result of a trial."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from csdctl.errors import NodeError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import PrivateData
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import (
    KEPT,
    TAKEN_BACK,
    TRIED,
    EpochEnd,
    Event,
    Joined,
    Probed,
    Progress,
    Rebalanced,
    SaveTimed,
    SumTimed,
)
from csdctl.worker.protocol.orders import Order, Probe, ProbeRequest, TakeSteps
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.tune import tuning_run
from csdctl.workflows.tune.tuning_run import TuningRun, read_trial
from tests.fake_session import FakeSession
from tests.unit.workflows.measured_project import PUBLIC, MeasuredProject, prepared, run_context, workspace

MIB = 1 << 20


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
        while not isinstance(order := how["next_order"](), tuning_run.Stop):
            for event in answer(order) if order else ():
                events.emit(event)
        return ""

    monkeypatch.setattr(tuning_run, "run_ranks", run_ranks)
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
    host, csd0 = orders[-1].ranks
    assert host.num_private == 0 < csd0.num_private
    assert csd0.num_private + csd0.num_public == 200


def test_balanced_batch_sizes_are_the_last_that_were_kept_or_taken_back(
    at: MeasuredProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(sizes: dict[str, int], outcome: str) -> Rebalanced:
        return Rebalanced(0, HOST_NAME, 1, 9, HOST_NAME, 1.2, sizes, outcome)

    changes: list[Event] = []

    def take_steps(order: Order) -> list[Event]:
        assert isinstance(order, TakeSteps)
        assert order.is_balanced
        assert [rank.max_batch_size for rank in order.ranks] == [20, 20]
        return [*changes, *(Probed(rank, NODES[rank], 10, None, 0, MIB) for rank in (0, 1))]

    started, _ = start_run(at, monkeypatch, RANKS, take_steps)
    with started as run:
        assert run.balance(RANKS, 20) == [10, 10]
        changes += [change({"0": 8, "1": 12}, TRIED), change({"0": 8, "1": 12}, KEPT)]
        assert run.balance(RANKS, 20) == [8, 12]
        changes += [change({"0": 7, "1": 13}, TRIED)]
        assert run.balance(RANKS, 20) == [8, 12]
        changes += [change({"0": 8, "1": 12}, TAKEN_BACK)]
        assert run.balance(RANKS, 20) == [8, 12]


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


@pytest.mark.parametrize("num_steps", [2, 20])
def test_first_step_with_its_batch_sizes_does_not_count(
    at: MeasuredProject, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """With TensorFlow, it takes up to four times as long as the next."""

    def take_steps(order: Order) -> list[Event]:
        assert isinstance(order, TakeSteps)
        steps = order.ranks[0].num_public // 10
        step_s = 0.1 if orders else 9.7
        orders.append(order)
        times = 1, steps, 0, step_s * steps, 0.0, step_s * steps, "", 20 * steps
        ends = [EpochEnd(rank, NODES[rank], *times, stepped_samples=20 * steps) for rank in (0, 1)]
        return [*ends, *(Probed(rank, NODES[rank], 10, None, 0, MIB) for rank in (0, 1))]

    orders: list[Order] = []
    started, _ = start_run(at, monkeypatch, RANKS, take_steps)
    with started as run:
        result = run.take_steps(RANKS, num_steps)
    assert len(orders) == 2
    assert result.step_s == pytest.approx(0.1)
    assert result.compute_s == pytest.approx((0.1, 0.1))


def test_all_steps_of_a_trial_count() -> None:
    events: list[Event] = [
        SumTimed(0, "host", (0, 1), 1 << 20, 0.02),
        SaveTimed(0, "host", 0.3),
        *(first_progress(rank) for rank in (0, 1)),
        *(epoch_end(rank) for rank in (0, 1)),
        *(Probed(rank, NODES[rank], 8, None, 0, (1 + rank) << 20) for rank in (1, 0)),
    ]
    result = read_trial(events, NODES)
    assert result.peak_memory_bytes == (1 << 20, 2 << 20)
    assert result.step_s == pytest.approx((1.5 + 18 * 0.1) / 20)
    assert result.samples_per_s == pytest.approx(40 / result.step_s)
    assert result.compute_s == pytest.approx(((1.0 + 18 * 0.09) / 20, (1.0 + 18 * 0.08) / 20))
    assert (result.sum_s, result.save_s) == (0.02, 0.3)
    assert read_trial([epoch_end(0), epoch_end(1)], NODES).peak_memory_bytes == (None, None)


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
        [replace(epoch_end(1), compute_s=0.0)],
    ],
)
def test_node_with_missing_or_impossible_steps_is_named(of_node: list[Event]) -> None:
    with pytest.raises(RunError, match="before csd0 had done all steps"):
        read_trial([*of_node[:1], epoch_end(0), *of_node[1:]], NODES)
