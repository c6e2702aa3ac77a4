"""What observations change in the model of the fleet: memory, fits of step times and sums, earlier trials."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.perfmodel.prediction import CollectiveCost, StepTime
from csdctl.tuning import fleet_model
from csdctl.tuning.fleet_model import ClassModel, FleetModel, fit_collective, fit_step_time, recall_class
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    Point,
    ProbeMeasurement,
    ProbeOutcome,
    TrialMeasurement,
    TrialRank,
)
from csdctl.tuning.plan_choice import choose_plan, limit_for_goodput, plan_ranks, predict_plan
from csdctl.tuning.search import Limits
from csdctl.worker.protocol.run_spec import Runtime


@pytest.mark.parametrize(
    ("peaks", "size", "expected"),
    [
        ({4: 90, 8: 100, 16: 130}, 8, 100),  # measured
        ({8: 100}, 16, None),
        ({4: 99, 16: 130, 8: 100}, 32, 130 + 16 * 30 // 8),  # from the largest size and half of it
        ({32: 100, 128: 196, 130: 298}, 260, 298 + 130 * 198 // 98),  # not from almost equal sizes
        ({8: 120, 16: 100}, 1000, 100),  # the peak of a process does not fall
        ({8: 100, 16: 130}, 12, 130),
    ],
)
def test_peak_is_extrapolated(peaks: dict[int, int], size: int, expected: int | None) -> None:
    assert fleet_model.predict_peak_bytes(peaks, size) == expected


@pytest.mark.parametrize(
    ("peaks", "memory", "largest"),
    [
        ({8: 100}, 250, 20),  # in proportion, without a line
        ({8: 100, 16: 100}, 250, 40),
        ({8: 100, 16: 180}, 380, 36),
        ({}, 380, None),
    ],
)
def test_largest_size_is_where_the_line_meets_the_memory(
    peaks: dict[int, int], memory: int, largest: int | None
) -> None:
    assert fleet_model.largest_within_memory(peaks, memory) == largest


HOST, NODE = StepTime(0.01, 0.002), StepTime(0.05, 0.02)
NODES = ("csd0", "csd1", "csd2")
SUM_S = 0.01


def points(step_time: StepTime, sizes: Sequence[int] = (8, 16, 32)) -> tuple[Point, ...]:
    return tuple(Point(size, step_time.at(size)) for size in sizes)


@pytest.fixture
def model() -> FleetModel:
    """A host and three equal nodes that were probed."""
    return FleetModel(
        ("host", *NODES),
        {"host": ClassModel(("host",), points=points(HOST)), "csd": ClassModel(NODES, points=points(NODE))},
        vector_bytes=1,
        required=frozenset({"host"}),
        collective_cost=CollectiveCost(fixed_s=SUM_S),
    )


def tried(
    model: FleetModel, factors: dict[str, float], overhead_factor: float = 1.0
) -> fleet_model.TriedPlan:
    """A trial of the best plan in which machines are slower by `factors` than in probes."""
    best = choose_plan(model, Limits(global_batch=200))
    step_times = model.step_times()
    times = [step_times[name].at(size) * factors.get(name, 1.0) for name, size in best.batch_sizes.items()]
    step_s = max(times) * overhead_factor + SUM_S
    result = fleet_model.TrialResult(step_s, 200 / step_s, tuple(times), SUM_S)
    return fleet_model.TriedPlan(best, plan_ranks(model, best), result)


def test_throughput_is_predicted_from_the_batch_size_of_each_machine_in_any_order(model: FleetModel) -> None:
    sizes = {"csd1": 8, "host": 64}
    expected = 72 / (max(HOST.at(64), NODE.at(8)) + SUM_S)
    assert predict_plan(model, sizes).samples_per_s == pytest.approx(expected)


def test_probe_counts_for_all_machines_of_its_class(model: FleetModel) -> None:
    learned = fleet_model.learn_probes(
        model, {"csd1": ProbeOutcome(64, NODE.at(64), 1 << 30), "csd2": ProbeOutcome(256, None)}
    )
    known = learned.class_of("csd0")
    assert known.sizes == {8, 16, 32, 64}
    assert (known.too_large, known.num_new_probes, known.peaks) == (256, 2, {64: 1 << 30})
    assert learned.class_of("host") == model.class_of("host")


def test_trial_scales_a_class_by_the_median_of_its_machines_and_the_overhead(model: FleetModel) -> None:
    learned = fleet_model.learn_trial(model, tried(model, {"csd0": 1.2, "csd1": 1.25, "csd2": 1.3}))
    assert learned.class_of("csd0").in_step_factor == pytest.approx(1.25)
    assert set(learned.outlier_factors.values()) == {1.0}
    assert learned.class_of("host").in_step_factor == pytest.approx(1.0)
    assert fleet_model.learn_trial(model, tried(model, {}, 1.3)).overhead_factor == pytest.approx(1.3)


def test_outlier_gets_a_step_time_of_its_own(model: FleetModel) -> None:
    learned = fleet_model.learn_trial(model, tried(model, {"csd1": 1.5}))
    assert learned.class_of("csd1").in_step_factor == pytest.approx(1.0)
    step_times = learned.step_times()
    assert step_times["csd1"].at(20) == pytest.approx(NODE.at(20) * 1.5)
    assert step_times["csd0"].at(20) == pytest.approx(NODE.at(20))
    sizes = choose_plan(learned, Limits(global_batch=200)).batch_sizes
    assert sizes["csd1"] < sizes["csd0"]


def test_node_that_joins_a_class_is_compared_with_its_known_level(model: FleetModel) -> None:
    known = replace(model, outlier_factors={"csd0": 1.0, "csd1": 1.0})
    times = {"csd0": NODE.at(8), "csd1": NODE.at(8), "csd2": 2 * NODE.at(8)}
    learned = fleet_model.learn_probes(known, {name: ProbeOutcome(8, time) for name, time in times.items()})
    assert learned.outlier_factors == pytest.approx({"csd0": 1.0, "csd1": 1.0, "csd2": 2.0})
    assert learned.step_times()["csd0"].at(64) == pytest.approx(NODE.at(64))


def test_trial_of_part_of_a_class_moves_no_machine_that_was_left_out(model: FleetModel) -> None:
    """The class has its median level. csd0 is quick, csd2 slow."""
    known = replace(model, outlier_factors={"csd0": 0.4, "csd1": 1.0, "csd2": 1.6})
    plan = tried(known, {})
    sizes = {name: size for name, size in plan.best.batch_sizes.items() if name in ("host", "csd0")}
    ranks = tuple(rank for rank in plan.ranks if rank.node in sizes)
    times = tuple(known.step_times()[name].at(size) for name, size in sizes.items())
    result = replace(plan.result, compute_s=times)
    part = fleet_model.TriedPlan(replace(plan.best, batch_sizes=sizes), ranks, result)
    learned = fleet_model.learn_trial(known, part)
    for name in NODES:
        assert learned.step_times()[name].at(32) == pytest.approx(known.step_times()[name].at(32))


def test_overhead_of_a_trial_is_recalled_with_the_factors_of_its_machines(model: FleetModel) -> None:
    known = replace(model, outlier_factors={"csd0": 0.5, "csd1": 1.0, "csd2": 1.0})
    plan = tried(known, {}, 1.2)
    ranks = tuple(
        TrialRank(
            "host" if rank.node == "host" else "csd",
            rank.batch_size,
            rank.runtime,
            known.outlier_factors.get(rank.node, 1.0),
        )
        for rank in plan.ranks
    )
    trial = TrialMeasurement(ranks, plan.result.step_s, plan.result.samples_per_s, 1.0)
    assert fleet_model.recall_overhead([trial], known) == pytest.approx(1.2)


def test_each_out_of_memory_makes_micro_batches_of_the_class_smaller(model: FleetModel) -> None:
    """A rank that computes in micro-batches runs out of memory by their size, not by that of its batch."""
    learned, sizes = fleet_model.learn_probes(model, {"csd1": ProbeOutcome(51, None)}), []
    for _ in range(4):
        sizes.append(learned.class_of("csd2").limit_at_once(1000))
        ranks = plan_ranks(learned, choose_plan(learned, Limits(global_batch=2000)))
        assert {rank.micro_batch_size for rank in ranks} == {None, sizes[-1]}
        learned = learned.with_class("csd", learned.class_of("csd1").with_out_of_memory(1000))
    assert sizes == [50, 29, 16, 9]


def test_smaller_of_two_memory_limits_holds() -> None:
    """One is extrapolated from the peaks of probes, the other a batch that did not fit."""
    of_class = ClassModel(NODES, peaks={50: 500, 100: 1000}, memory_bytes=2000)
    limits = [replace(of_class, too_large=size).max_at_once for size in (None, 150, 250)]
    assert limits == [200, 149, 200]


def with_public(model: FleetModel, share: float) -> FleetModel:
    """Return the fleet with this share of public samples; each node has as many private ones."""
    nodes = model.machines[1:]
    return replace(
        model,
        private_shares=dict.fromkeys(nodes, (1 - share) / len(nodes)),
        required=frozenset(model.machines),
    )


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("most", [40, 90, 200])
def test_limited_host_and_nodes_together_keep_to_the_global_batch(
    model: FleetModel, share: float, most: int
) -> None:
    sizes = choose_plan(with_public(model, share), Limits(max_global_batch=most)).batch_sizes
    assert sum(sizes.values()) <= most
    assert sizes.get("host", 0) <= share * sum(sizes.values())
    exact = choose_plan(with_public(model, 0.25), Limits(global_batch=most)).batch_sizes
    assert sum(exact.values()) == most
    assert 0.2 * most <= exact["host"] <= 0.25 * most


@pytest.mark.parametrize("share", [1 / 6, 0.9])
def test_node_with_most_private_samples_has_its_part_of_every_step(model: FleetModel, share: float) -> None:
    """Else the others would have nothing left to read while it goes on alone."""
    only = replace(model, private_shares={"csd0": share}, required=frozenset({"host", "csd0"}))
    sizes = choose_plan(only, Limits(max_global_batch=128)).batch_sizes
    assert sizes["csd0"] >= share * sum(sizes.values())


@pytest.mark.parametrize("noise_scale", [1, 30, 300, 1e9])
def test_global_batch_of_the_most_goodput(model: FleetModel, noise_scale: float) -> None:
    """No larger and no smaller batch makes more progress per second."""
    reference = 40

    def goodput(limit: int) -> float:
        best = choose_plan(model, Limits(limit))
        size = sum(best.batch_sizes.values())
        return best.prediction.samples_per_s * min(1, (noise_scale + reference) / (noise_scale + size))

    most = Limits(1000)
    chosen = limit_for_goodput(model, most, noise_scale, reference).largest_global_batch
    assert goodput(chosen) >= 0.98 * max(goodput(limit) for limit in range(8, 1001, 8))
    smaller = limit_for_goodput(model, most, noise_scale / 10, reference).largest_global_batch
    assert smaller <= chosen
    assert smaller < 100 or noise_scale > 300
    exact = Limits(global_batch=500)
    assert limit_for_goodput(model, exact, noise_scale, reference) == exact


SIZES = (4, 8, 16, 32, 64, 128, 256)


@given(fixed_s=st.floats(0, 1.0), per_sample_s=st.floats(1e-4, 1.0))
def test_line_is_found_from_exact_probes(fixed_s: float, per_sample_s: float) -> None:
    found = fit_step_time(points(StepTime(fixed_s, per_sample_s), SIZES))
    for size in (1, 20, 500):
        assert found.at(size) == pytest.approx(fixed_s + per_sample_s * size, rel=0.02)


def test_one_disturbed_probe_does_not_bend_the_line() -> None:
    line = StepTime(0.02, 0.001)
    disturbed = [*points(line, SIZES)[:-1], Point(96, line.at(96) * 3)]
    assert fit_step_time(disturbed).at(64) == pytest.approx(line.at(64), rel=0.1)


def test_one_size_gives_a_line_through_the_origin_and_shorter_steps_still_a_step_time() -> None:
    found = fit_step_time([Point(16, 0.4), Point(16, 0.4)])
    assert (found.fixed_s, found.per_sample_s) == (0.0, pytest.approx(0.025))
    flat = fit_step_time([Point(8, 1.0), Point(32, 0.98)])
    assert {type(flat.fixed_s), type(flat.per_sample_s)} == {float}, "they are written as YAML"
    assert 0.9 < flat.at(1) <= flat.at(64) < 1.2, "noise hides that the step grows a little"


PLACES = [(ranks, size) for ranks in (2, 5) for size in (1 << 16, 1 << 20, 1 << 23)]


def timed(cost: CollectiveCost, factor: float = 1.0) -> list[CollectiveMeasurement]:
    return [CollectiveMeasurement(ranks, size, factor * cost.at(size, ranks), 0.0) for ranks, size in PLACES]


@given(
    fixed_s=st.floats(1e-5, 1e-2),
    per_rank_s=st.floats(0, 1e-3),
    per_byte_s=st.floats(1e-10, 1e-8),
    per_rank_byte_s=st.floats(0, 1e-8),
)
def test_cost_is_found_from_exact_sums(
    fixed_s: float, per_rank_s: float, per_byte_s: float, per_rank_byte_s: float
) -> None:
    cost = CollectiveCost(fixed_s, per_rank_s, per_byte_s, per_rank_byte_s)
    found = fit_collective(timed(cost))
    for ranks, size in [*PLACES, (9, 10_000_000)]:
        assert found.at(size, ranks) == pytest.approx(cost.at(size, ranks), rel=0.02)


COST = CollectiveCost(0.001, 0.0, 1e-9, 1e-9)
NEWER = [replace(measurement, measured_at=1.0) for measurement in timed(COST)]
ALONE = CollectiveMeasurement(1, 1 << 20, 0.0, 0.0)


@pytest.mark.parametrize(
    "measured",
    [
        [*timed(COST), *timed(COST, factor=0.2), *timed(COST)],  # one lucky sum does not
        [*(NEWER * 5), *(timed(COST, factor=0.2) * 20)],  # the network has become slower
        [*timed(COST), ALONE],
    ],
)
def test_sums_that_count(measured: list[CollectiveMeasurement]) -> None:
    found = fit_collective(measured)
    assert found.at(1 << 20, 5) == pytest.approx(COST.at(1 << 20, 5), rel=0.01)


def test_noise_gives_no_negative_time_and_no_sums_none() -> None:
    noisy = [CollectiveMeasurement(2, 1 << 16, 0.004, 0.0), CollectiveMeasurement(5, 1 << 23, 0.001, 0.0)]
    found = fit_collective(noisy)
    assert min(found.at(1 << 10, 2), found.at(1 << 26, 40)) >= 0
    assert fit_collective([]) == CollectiveCost()


SETTINGS = Runtime(2)
LINE = StepTime(0.1, 0.01)


def probed(*sizes: int, settings: Runtime = SETTINGS) -> list[ProbeMeasurement]:
    known = {"settings": settings, "measured_at": 1.0}
    return [ProbeMeasurement(size, LINE.at(size), 1 << 20, **known) for size in sizes]


def tried_at(size: int, ratio: float, measured_at: float) -> ProbeMeasurement:
    return ProbeMeasurement(size, LINE.at(size) * ratio, None, settings=SETTINGS, measured_at=measured_at)


@pytest.mark.parametrize("settings", [Runtime(2, device="gpu"), Runtime(1)])
def test_probes_with_other_settings_do_not_count(settings: Runtime) -> None:
    probes = [*probed(8, 16), *probed(64, settings=settings), tried_at(32, 1.0, 5.0)]
    assert recall_class(ClassModel(("a",), SETTINGS), probes).sizes == {8, 16}
    assert recall_class(ClassModel(("a",), settings), probes).sizes == {64}


def test_newest_trial_in_which_the_machine_trained_scales_what_was_probed() -> None:
    """A size that did not fit once fits later, and one below the largest has no peak of its own."""
    too_large = ProbeMeasurement(16, None, settings=SETTINGS, measured_at=1.0)
    smaller = replace(probed(4)[0], peak_memory_bytes=0)
    trials = [tried_at(32, 2.0, 5.0), *(tried_at(32, ratio, 9.0) for ratio in (1.1, 1.2, 1.6))]
    recalled = recall_class(ClassModel(("a",), SETTINGS), [too_large, *probed(8), smaller, *trials])
    assert (recalled.sizes, recalled.too_large, recalled.num_new_probes) == ({4, 8}, 16, 0)
    assert recalled.peaks == {8: 1 << 20}, "a trial does not show what fits at once"
    assert recalled.step_time().at(10) == pytest.approx(1.2 * LINE.at(10))
    assert recall_class(ClassModel(("a",), SETTINGS), [too_large, *probed(20)]).too_large is None
    idle = ProbeMeasurement(0, 0.01, None, settings=SETTINGS, measured_at=9.0)
    assert recall_class(ClassModel(("a",), SETTINGS), [*probed(8), idle]).in_step_factor == 1.0
