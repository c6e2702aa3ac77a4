"""The curve over the number of nodes, with fixed and with the best batch sizes, and the verdict on it."""

import itertools
from dataclasses import replace

import pytest

from csdctl.perfmodel import prediction
from csdctl.perfmodel.prediction import CollectiveCost, RankModel, StepTime, calibrate_overhead
from csdctl.tuning import scaling_curve
from csdctl.tuning.scaling_curve import Power, Reason, ScalableFleet, judge, predict_curve, size_ranks
from csdctl.tuning.search import Limits

FLAT_HOST = RankModel("host", StepTime(0.0, 0.01), is_required=True, batch_size=100)
FLAT_NODE = RankModel("csd0", StepTime(0.0, 0.1), batch_size=10)
HOST = RankModel("host", StepTime(0.02, 0.002), is_required=True, batch_size=100)
CSD = RankModel("csd0", StepTime(0.1, 0.02), batch_size=5)
DPU = RankModel("dpu0", StepTime(0.1, 0.01), batch_size=10)
SUMS = CollectiveCost(fixed_s=0.001, per_rank_s=0.002)
NOTHING = CollectiveCost()
DEAR = CollectiveCost(per_rank_s=5.0)
FLEET = ScalableFleet(HOST, (CSD, DPU), SUMS)
CHOOSING = replace(FLEET, limits=lambda num_nodes: Limits(max_global_batch=512))


def curve(
    max_nodes: int, cost: CollectiveCost = NOTHING, power: Power | None = None
) -> list[scaling_curve.CurvePoint]:
    return predict_curve(ScalableFleet(FLAT_HOST, (FLAT_NODE,), cost), range(max_nodes + 1), power)


def verdict(
    max_nodes: int, cost: CollectiveCost = NOTHING, power: Power | None = None
) -> scaling_curve.CurveVerdict:
    return judge(curve(max_nodes, cost, power), [FLAT_NODE])


class TestFixedBatchSizes:
    def test_host_alone_has_no_overhead_and_no_sum(self) -> None:
        fleet = ScalableFleet(FLAT_HOST, (FLAT_NODE,), CollectiveCost(1.0, 1.0), overhead_factor=1.5)
        [alone] = predict_curve(fleet, [0])
        assert (alone.samples_per_s, alone.speedup, alone.efficiency) == pytest.approx((100.0, 1.0, 1.0))

    def test_balanced_nodes_add_their_whole_speed_and_a_larger_fleet_repeats_them(self) -> None:
        assert [point.samples_per_s for point in curve(4)] == pytest.approx([100, 110, 120, 130, 140])
        quick = RankModel("dpu", StepTime(0.0, 0.02), batch_size=50)
        points = predict_curve(ScalableFleet(FLAT_HOST, (FLAT_NODE, quick)), range(5))
        assert [point.global_batch for point in points] == [100, 110, 160, 170, 220]
        with pytest.raises(ValueError, match="without one to repeat"):
            predict_curve(ScalableFleet(FLAT_HOST, ()), [1])

    def test_energy_of_a_sample_follows_from_rate_and_power(self) -> None:
        point = curve(10, power=Power(300, 10))[10]
        assert (point.samples_per_s, point.power_w, point.joules_per_image) == pytest.approx((200, 400, 2))
        assert curve(10)[10].joules_per_image is None


class TestVerdict:
    @pytest.mark.parametrize(
        ("num_nodes", "cost", "power", "reasons"),
        [
            (10, CollectiveCost(), None, ()),
            (3, CollectiveCost(fixed_s=0.5), None, (Reason.SLOWER,)),
            (1, CollectiveCost(fixed_s=0.06), None, (Reason.LITTLE_GAIN,)),
            (10, CollectiveCost(), Power(100, 20), (Reason.NO_ENERGY_SAVED,)),
            (10, CollectiveCost(), Power(100, 5), ()),
        ],
    )
    def test_reasons_against_nodes(
        self, num_nodes: int, cost: CollectiveCost, power: Power | None, reasons: tuple[Reason, ...]
    ) -> None:
        judged = verdict(num_nodes, cost, power)
        assert judged.reasons == reasons

    def test_first_node_may_cost_more_than_it_adds_and_later_ones_pay(self) -> None:
        judged = verdict(20, CollectiveCost(fixed_s=0.5))
        assert (judged.reasons, judged.worth_from, judged.useful_nodes) == ((), 6, 20)

    def test_verdict_names_the_number_beyond_which_the_sum_outweighs_a_node(self) -> None:
        # Rates go towards 10 / 0.05 = 200 samples/s: each node adds less than the one before.
        judged = verdict(200, CollectiveCost(per_rank_s=0.05))
        points = curve(200, CollectiveCost(per_rank_s=0.05))
        added = [after.samples_per_s - before.samples_per_s for before, after in itertools.pairwise(points)]
        assert 0 < judged.useful_nodes < 200
        assert added[judged.useful_nodes - 1] >= 1 > added[judged.useful_nodes]

    def test_verdict_names_the_number_with_the_least_energy(self) -> None:
        points = curve(200, CollectiveCost(per_rank_s=0.02), Power(300, 5))
        energies = [point.joules_per_image or 0.0 for point in points]
        least = judge(points, [FLAT_NODE]).least_energy_nodes
        assert least == energies.index(min(energies))
        assert 0 < least < 200
        assert verdict(10).least_energy_nodes is None


class TestChosenBatchSizes:
    def test_only_the_planned_fleet_keeps_its_batch_sizes(self) -> None:
        first, second, third = predict_curve(replace(CHOOSING, is_planned=True), [1, 2, 3])
        [kept] = predict_curve(FLEET, [2])
        assert second == replace(kept, speedup=second.speedup)
        assert second.global_batch == 115 < min(first.global_batch, third.global_batch)

    def test_host_without_useful_nodes_is_as_fast_as_alone_unless_they_are_required(self) -> None:
        dear = replace(CHOOSING, sum_cost=DEAR, overhead_factor=1.5)
        alone, pair = predict_curve(dear, [0, 2], Power(host_w=100.0, node_w=10.0))
        assert (pair.num_left_out, pair.sum_s) == (2, 0)
        assert pair.samples_per_s == pytest.approx(alone.samples_per_s)
        assert pair.power_w == alone.power_w == 100.0
        required = tuple(replace(node, is_required=True) for node in dear.nodes)
        [point] = predict_curve(replace(dear, nodes=required), [2])
        assert point.num_left_out == 0

    def test_slow_host_sits_out_and_still_takes_part_in_the_sum(self) -> None:
        host = RankModel("host", StepTime(3.0, 1.0), is_required=True, batch_size=1)
        node = RankModel("csd0", StepTime(0.01, 0.001), batch_size=50)
        strict = ScalableFleet(host, (node,), SUMS, limits=lambda num_nodes: Limits(max_global_batch=64))
        [point] = predict_curve(strict, [4])
        assert not point.is_host_training
        assert point.sum_s == pytest.approx(SUMS.at(0, 5))

    def test_planned_host_may_sit_out(self) -> None:
        idle = replace(CHOOSING, is_planned=True, idle=frozenset({"host"}))
        [point] = predict_curve(idle, [2])
        assert (point.global_batch, point.is_host_training, point.num_left_out) == (15, False, 0)
        assert point.step_s == pytest.approx(DPU.step_time.at(10) + SUMS.at(0, 3))
        [single] = predict_curve(replace(idle, nodes=(CSD,), overhead_factor=1.2), [1])
        assert single.step_s == pytest.approx(1.2 * CSD.step_time.at(5) + SUMS.at(0, 2))


def test_overhead_factor_makes_the_model_agree_with_a_trial() -> None:
    tried = [(HOST.step_time, 100), (CSD.step_time, 10)]
    for factor in (1.25, 0.9):
        assert calibrate_overhead(tried, 0.3 * factor + 0.01, 0.01) == pytest.approx(factor)
    assert calibrate_overhead(tried, 0.3, 0.5) == prediction.MIN_OVERHEAD_FACTOR


def test_rank_without_a_batch_size_gets_as_much_as_the_others_time_allows() -> None:
    sizes = {"host": 190, "csd0": 10}
    assert [rank.batch_size for rank in size_ranks([HOST, CSD, DPU], sizes)] == [190, 10, 30]
    slow = RankModel("slow", StepTime(9.0, 9.0))
    assert [rank.batch_size for rank in size_ranks([HOST, CSD, slow], sizes)] == [190, 10, 1]
