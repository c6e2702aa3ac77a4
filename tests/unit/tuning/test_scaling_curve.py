"""The curve with the best batch sizes for every number of nodes."""

from dataclasses import replace

import pytest

from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.energy import Power
from csdctl.perfmodel.prediction import RankModel
from csdctl.perfmodel.scaling import PlannedRank, predict_curve
from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.host_choice import find_best_ranks
from csdctl.tuning.scaling_curve import (
    MIN_OVERHEAD_FACTOR,
    Choice,
    Costs,
    calibrate_overhead,
    choose_best,
    predict_best_curve,
    size_ranks,
)
from csdctl.tuning.search import Limits, RankCandidate
from csdctl.tuning.stannis import TuningError

HOST = RankModel("host", StepTime(0.02, 0.002))
CSD = RankModel("csd0", StepTime(0.1, 0.02))
DPU = RankModel("dpu0", StepTime(0.1, 0.01))
SUMS = CollectiveCost(fixed_s=0.001, per_rank_s=0.002)
COSTS = Costs(SUMS, 0)
WITHIN = Choice(lambda num_nodes: Limits(max_global_batch=512))
PLANNED = [PlannedRank(HOST, 100), PlannedRank(CSD, 5), PlannedRank(DPU, 10)]


def test_chosen_batch_sizes_are_no_slower_than_fixed_ones() -> None:
    host, *nodes = PLANNED
    chosen = predict_best_curve(host, nodes, range(6), WITHIN, COSTS)
    kept = predict_curve(host, nodes, 5, SUMS)
    for best, fixed in zip(chosen, kept, strict=True):
        assert best.samples_per_s >= fixed.samples_per_s * 0.995
        assert best.global_batch <= 512


def test_only_the_planned_fleet_keeps_its_batch_sizes() -> None:
    host, *nodes = PLANNED
    planned = Choice(WITHIN.limits, is_planned=True)
    points = predict_best_curve(host, nodes, [1, 2, 3], planned, COSTS)
    assert points[1].global_batch == 115
    kept = predict_curve(host, nodes, 2, SUMS)[2]
    assert points[1] == replace(kept, speedup=points[1].speedup)
    assert points[0].global_batch > 115
    assert points[2].global_batch > 115


def test_larger_fleet_repeats_the_nodes() -> None:
    best = choose_best(HOST, [CSD, DPU], 5, WITHIN, COSTS)
    assert list(best.batch_sizes) == ["host", "csd0", "dpu0", "csd0#1", "dpu0#1", "csd0#2"]
    assert best.batch_sizes["csd0#1"] == best.batch_sizes["csd0"]


def test_host_alone_has_no_overhead() -> None:
    slow = Costs(SUMS, 0, overhead_factor=2.0)
    alone = choose_best(HOST, [CSD], 0, WITHIN, slow)
    assert alone.prediction == choose_best(HOST, [CSD], 0, WITHIN, COSTS).prediction


def test_host_without_useful_nodes_is_as_fast_as_alone() -> None:
    dear = Costs(CollectiveCost(per_rank_s=5.0), 0, overhead_factor=1.5)
    alone, pair = predict_best_curve(
        PLANNED[0], PLANNED[1:], [0, 2], WITHIN, dear, Power(host_w=100.0, node_w=10.0)
    )
    assert pair.num_left_out == 2
    assert pair.samples_per_s == pytest.approx(alone.samples_per_s)
    assert pair.power_w == alone.power_w == 100.0
    assert pair.sum_s == 0


def test_host_with_all_nodes_left_out_draws_the_power_of_its_server() -> None:
    dear = Costs(CollectiveCost(per_rank_s=5.0), 0)
    power = Power(host_w=100.0, node_w=10.0, without_nodes_w=300.0)
    alone, pair = predict_best_curve(PLANNED[0], PLANNED[1:], [0, 2], WITHIN, dear, power)
    assert pair.num_left_out == 2
    assert (alone.power_w, pair.power_w) == (300.0, 100.0)


def test_required_nodes_are_kept_whatever_they_cost() -> None:
    dear = Costs(CollectiveCost(per_rank_s=5.0), 0)
    private = Choice(WITHIN.limits, is_required=True)
    [point] = predict_best_curve(PLANNED[0], PLANNED[1:], [2], private, dear)
    assert point.num_left_out == 0


def test_limits_that_allow_no_plan_are_an_error() -> None:
    with pytest.raises(TuningError, match="no plan for 3 ranks"):
        choose_best(HOST, [CSD], 2, Choice(lambda _: Limits(max_global_batch=2), is_required=True), COSTS)


def test_slow_host_sits_out_and_still_takes_part_in_the_sum() -> None:
    slow = RankModel("host", StepTime(3.0, 1.0))
    quick = RankModel("csd0", StepTime(0.01, 0.001))
    host, node = PlannedRank(slow, 1), PlannedRank(quick, 50)
    strict = Choice(lambda num_nodes: Limits(max_global_batch=64))
    [point] = predict_best_curve(host, [node], [4], strict, COSTS)
    assert not point.is_host_training
    assert point.sum_s == pytest.approx(SUMS.at(0, 5))
    assert point.num_left_out == 0


def test_planned_host_may_sit_out() -> None:
    host, *nodes = PLANNED
    idle = Choice(WITHIN.limits, is_planned=True, idle=frozenset({"host"}))
    [point] = predict_best_curve(host, nodes, [2], idle, COSTS)
    assert (point.global_batch, point.is_host_training, point.num_left_out) == (15, False, 0)
    assert point.sum_s == pytest.approx(SUMS.at(0, 3))
    assert point.step_s == pytest.approx(DPU.step_time.at(10) + point.sum_s)


def test_host_that_gains_a_little_by_sitting_out_trains() -> None:
    nodes = [RankCandidate("csd0", StepTime(0.02, 0.002))]
    host = RankCandidate("host", StepTime(0.02, 0.002), is_required=True)
    best = find_best_ranks(host, nodes, Limits(max_global_batch=64), COSTS.sum_s)
    assert set(best.batch_sizes) == {"host", "csd0"}


def test_node_is_in_step_with_a_planned_host_that_sits_out() -> None:
    host, node = PLANNED[:2]
    idle = Choice(WITHIN.limits, is_planned=True, idle=frozenset({"host"}))
    [point] = predict_best_curve(host, [node], [1], idle, replace(COSTS, overhead_factor=1.2))
    assert point.step_s == pytest.approx(1.2 * CSD.step_time.at(5) + SUMS.at(0, 2))


HOST_THERE = RankCandidate("host", HOST.step_time, is_required=True)


def test_host_alone_is_compared_without_the_overhead_of_the_fleet() -> None:
    """The nodes add a quarter; the overhead costs more."""
    nodes = [RankCandidate(f"csd{number}", StepTime(0.0, 0.02)) for number in range(3)]
    best = find_best_ranks(HOST_THERE, nodes, Limits(max_global_batch=512), COSTS.sum_s, overhead_factor=1.5)
    assert set(best.batch_sizes) == {"host"}
    assert best.left_out == ("csd0", "csd1", "csd2")
    alone = find_best_ranks(HOST_THERE, [], Limits(max_global_batch=512), COSTS.sum_s)
    assert best.prediction == alone.prediction


def test_nodes_stay_when_the_host_alone_is_as_fast() -> None:
    nodes = [RankCandidate("csd0", StepTime(0.0, 0.02))]
    best = find_best_ranks(
        HOST_THERE, nodes, Limits(max_global_batch=512), lambda _: 0.0, overhead_factor=1.1
    )
    assert best.left_out == ()


def test_host_alone_is_found_where_its_fleet_is_too_slow_for_the_limit() -> None:
    nodes = [RankCandidate("csd0", StepTime(0.0, 0.02))]
    limits = Limits(max_step_s=0.03, max_global_batch=512)
    best = find_best_ranks(HOST_THERE, nodes, limits, COSTS.sum_s, overhead_factor=1.5)
    assert set(best.batch_sizes) == {"host"}


def test_overhead_factor_makes_the_model_agree_with_a_trial() -> None:
    tried = [(HOST.step_time, 100), (CSD.step_time, 10)]
    assert calibrate_overhead(tried, 0.3 * 1.25 + 0.01, 0.01) == pytest.approx(1.25)
    assert calibrate_overhead(tried, 0.3 * 0.9 + 0.01, 0.01) == pytest.approx(0.9)
    assert calibrate_overhead(tried, 0.3, 0.5) == MIN_OVERHEAD_FACTOR


def test_rank_without_a_batch_size_gets_as_much_as_the_others_time_allows() -> None:
    sized = size_ranks([HOST, CSD, DPU], {"host": 190, "csd0": 10})
    assert [rank.batch_size for rank in sized] == [190, 10, 30]
    late = size_ranks([HOST, CSD, RankModel("slow", StepTime(9.0, 9.0))], {"host": 190, "csd0": 10})
    assert late[2].batch_size == 1
