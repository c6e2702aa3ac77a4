"""What observations change in the model of the fleet, and the memory of batch sizes."""

from dataclasses import replace

import pytest

from csdctl.perfmodel.prediction import CollectiveCost, StepTime
from csdctl.tuning.fleet_model import (
    OOM_RETRY_SHARE,
    ClassModel,
    FleetModel,
    ProbeOutcome,
    TrialResult,
    TriedPlan,
    largest_within_memory,
    learn_probes,
    learn_trial,
    predict_peak_bytes,
)
from csdctl.tuning.measurements import Point
from csdctl.tuning.plan_choice import choose_plan, limit_for_goodput, plan_ranks
from csdctl.tuning.search import Limits


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
    assert predict_peak_bytes(peaks, size) == expected


@pytest.mark.parametrize("peaks", [{8: 100}, {8: 100, 16: 100}])
def test_memory_grows_in_proportion_without_a_line(peaks: dict[int, int]) -> None:
    assert largest_within_memory(peaks, 250) == max(peaks) * 250 // 100


def test_largest_size_is_where_the_line_meets_the_memory() -> None:
    assert largest_within_memory({8: 100, 16: 180}, 380) == 36
    assert largest_within_memory({}, 380) is None


HOST, NODE = StepTime(0.01, 0.002), StepTime(0.05, 0.02)
NODES = ("csd0", "csd1", "csd2")
SUM_S = 0.01


def points(step_time: StepTime) -> tuple[Point, ...]:
    return tuple(Point(size, step_time.at(size)) for size in (8, 16, 32))


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


def tried(model: FleetModel, factors: dict[str, float], overhead_factor: float = 1.0) -> TriedPlan:
    """A trial of the best plan in which machines are slower by `factors` than in probes."""
    best = choose_plan(model, Limits(global_batch=200))
    step_times = model.machine_step_times()
    times = [step_times[name].at(size) * factors.get(name, 1.0) for name, size in best.batch_sizes.items()]
    step_s = max(times) * overhead_factor + SUM_S
    result = TrialResult(5, step_s, 200 / step_s, tuple(times), 5 * step_s, "star", SUM_S)
    return TriedPlan(best, plan_ranks(model, best), result)


def test_probe_counts_for_all_machines_of_its_class(model: FleetModel) -> None:
    learned = learn_probes(
        model, {"csd1": ProbeOutcome(64, NODE.at(64), 3, {64: 1 << 30}), "csd2": ProbeOutcome(256, None)}
    )
    known = learned.class_of("csd0")
    assert known.sizes == {8, 16, 32, 64}
    assert (known.too_large, known.num_new_probes, known.peaks) == (256, 2, {64: 1 << 30})
    assert learned.class_of("host") == model.class_of("host")


def test_trial_scales_the_class_by_the_median_of_its_machines(model: FleetModel) -> None:
    learned = learn_trial(model, tried(model, {"csd0": 1.2, "csd1": 1.25, "csd2": 1.3}))
    assert learned.class_of("csd0").in_step_factor == pytest.approx(1.25)
    assert set(learned.outlier_factors.values()) == {1.0}
    assert learned.class_of("host").in_step_factor == pytest.approx(1.0)


def test_outlier_gets_a_step_time_of_its_own(model: FleetModel) -> None:
    learned = learn_trial(model, tried(model, {"csd1": 1.5}))
    assert learned.class_of("csd1").in_step_factor == pytest.approx(1.0)
    step_times = learned.machine_step_times()
    assert step_times["csd1"].at(20) == pytest.approx(NODE.at(20) * 1.5)
    assert step_times["csd0"].at(20) == pytest.approx(NODE.at(20))
    sizes = choose_plan(learned, Limits(global_batch=200)).batch_sizes
    assert sizes["csd1"] < sizes["csd0"]


def test_overhead_of_a_step_is_that_of_the_trial(model: FleetModel) -> None:
    assert learn_trial(model, tried(model, {}, 1.3)).overhead_factor == pytest.approx(1.3)


def test_out_of_memory_limits_what_the_class_computes_at_once(model: FleetModel) -> None:
    learned = model.with_class("csd", model.class_of("csd1").with_out_of_memory(100))
    assert learned.class_of("csd2").max_at_once == round(100 * OOM_RETRY_SHARE) - 1
    ranks = plan_ranks(learned, choose_plan(learned, Limits(global_batch=2000)))
    assert all((rank.micro_batch_size or 0) < 100 for rank in ranks if rank.node in NODES)
    assert learned.class_of("host").max_at_once is None


def test_each_out_of_memory_makes_micro_batches_smaller(model: FleetModel) -> None:
    """A rank that computes in micro-batches runs out of memory by their size, not by that of its batch."""
    sizes = [50]
    known = learn_probes(model, {"csd1": ProbeOutcome(sizes[0] + 1, None)}).class_of("csd1")
    for _ in range(3):
        assert known.limit_at_once(1000) == sizes[-1]
        known = known.with_out_of_memory(1000)
        sizes.append(known.limit_at_once(1000))
    assert sizes == [50, 29, 16, 9]


def test_smaller_of_two_memory_limits_holds() -> None:
    """One is extrapolated from the peaks of probes, the other a batch that did not fit."""
    known = ClassModel(NODES, peaks={50: 500, 100: 1000}, memory_bytes=2000)
    assert known.max_at_once == 200
    assert replace(known, too_large=150).max_at_once == 149
    assert replace(known, too_large=250).max_at_once == 200


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("most", [40, 90, 200])
def test_limited_host_and_nodes_together_stay_within_the_global_batch(
    model: FleetModel, share: float, most: int
) -> None:
    sizes = choose_plan(replace(model, max_host_share=share), Limits(max_global_batch=most)).batch_sizes
    assert sum(sizes.values()) <= most
    assert sizes.get("host", 0) <= share * sum(sizes.values())


def test_exact_global_batch_is_kept_with_a_limited_host(model: FleetModel) -> None:
    sizes = choose_plan(replace(model, max_host_share=0.25), Limits(global_batch=90)).batch_sizes
    assert sum(sizes.values()) == 90
    assert sizes["host"] == 22


@pytest.mark.parametrize("noise_scale", [1, 30, 300, 1e9])
def test_global_batch_of_the_most_goodput(model: FleetModel, noise_scale: float) -> None:
    """No larger and no smaller batch makes more progress per second; without noise, the smallest does."""

    def goodput(limit: int) -> float:
        best = choose_plan(model, Limits(limit))
        return best.prediction.samples_per_s / (1 + sum(best.batch_sizes.values()) / noise_scale)

    most = Limits(1000)
    chosen = limit_for_goodput(model, most, noise_scale).largest_global_batch
    assert goodput(chosen) >= 0.98 * max(goodput(limit) for limit in range(8, 1001, 8))
    smaller = limit_for_goodput(model, most, noise_scale / 10).largest_global_batch
    assert smaller <= chosen
    assert smaller < 100 or noise_scale > 300
    assert limit_for_goodput(model, Limits(global_batch=500), noise_scale) == Limits(global_batch=500)
