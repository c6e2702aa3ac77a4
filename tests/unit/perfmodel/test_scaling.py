"""The curve over the number of nodes, and the verdict on it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.energy import Power
from csdctl.perfmodel.prediction import RankModel, predict
from csdctl.perfmodel.recommendation import Reason, Verdict, judge
from csdctl.perfmodel.ring import RingCost, SumCost, ring_share
from csdctl.perfmodel.scaling import CurvePoint, PlannedRank, predict_curve
from csdctl.perfmodel.step_time import StepTime

NOTHING = CollectiveCost()
HOST = PlannedRank(RankModel("host", StepTime(0.0, 0.01)), 100)
NODE = PlannedRank(RankModel("csd0", StepTime(0.0, 0.1)), 10)


def curve(max_nodes: int, cost: SumCost = NOTHING, power: Power | None = None) -> list[CurvePoint]:
    return predict_curve(HOST, [NODE], max_nodes, cost, power=power)


def verdict(max_nodes: int, cost: SumCost = NOTHING, power: Power | None = None) -> Verdict:
    return judge(curve(max_nodes, cost, power), [NODE])


planned = st.builds(
    lambda fixed_s, per_sample_s, size: PlannedRank(RankModel("csd", StepTime(fixed_s, per_sample_s)), size),
    st.floats(0, 10),
    st.floats(1e-4, 10),
    st.integers(1, 500),
)


@given(
    planned,
    st.lists(planned, min_size=1, max_size=4),
    st.builds(CollectiveCost, st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 1e-6), st.floats(0, 1e-7)),
    st.floats(1, 1.5),
    st.integers(1, 9),
)
def test_every_point_agrees_with_predict(
    host: PlannedRank, nodes: list[PlannedRank], cost: CollectiveCost, overhead_factor: float, num_nodes: int
) -> None:
    point = predict_curve(host, nodes, num_nodes, cost, gradient_bytes=1000, overhead_factor=overhead_factor)[
        num_nodes
    ]
    ranks = [host, *(nodes[number % len(nodes)] for number in range(num_nodes))]
    predicted = predict(
        [rank.model for rank in ranks],
        [rank.batch_size for rank in ranks],
        cost.at(1000, len(ranks)),
        overhead_factor,
    )
    assert point.step_s == pytest.approx(predicted.step_s)
    assert point.samples_per_s == pytest.approx(predicted.samples_per_s)
    assert point.speedup == pytest.approx(predicted.samples_per_s / host.samples_per_s)
    assert point.efficiency == pytest.approx(predicted.samples_per_s / predicted.ceiling_samples_per_s)
    assert point.global_batch == sum(rank.batch_size for rank in ranks)


def test_host_alone_has_no_overhead_and_no_sum() -> None:
    cost = CollectiveCost(fixed_s=1.0, per_rank_s=1.0)
    alone = predict_curve(HOST, [NODE], 1, cost, overhead_factor=1.5)[0]
    assert (alone.samples_per_s, alone.speedup, alone.efficiency) == (100.0, 1.0, 1.0)


def test_without_a_sum_balanced_nodes_add_their_whole_speed() -> None:
    points = curve(4)
    assert [point.samples_per_s for point in points] == pytest.approx([100, 110, 120, 130, 140])
    assert all(point.efficiency == pytest.approx(1) for point in points)


def test_larger_fleet_has_the_same_mixture() -> None:
    quick = PlannedRank(RankModel("dpu", StepTime(0.0, 0.02)), 50)
    points = predict_curve(HOST, [NODE, quick], 4, NOTHING)
    assert [point.global_batch for point in points] == [100, 110, 160, 170, 220]


def test_unknown_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="without one to repeat"):
        predict_curve(HOST, [], 1, NOTHING)
    assert len(predict_curve(HOST, [], 0, NOTHING)) == 1


def test_time_and_energy_of_a_job_follow_from_rate_and_power() -> None:
    point = curve(10, power=Power(300, 10))[10]
    assert point.samples_per_s == pytest.approx(200)
    assert point.power_w == 400
    assert point.joules_per_image == pytest.approx(2)
    assert point.time_s(1000) == pytest.approx(5)
    assert point.energy_joules(1000) == pytest.approx(2000)
    assert curve(10)[10].energy_joules(1000) is None


def test_thousand_nodes_are_visited_once_each() -> None:
    class Counting(CollectiveCost):
        def at(self, num_bytes: int, num_ranks: int) -> float:
            visited.append(num_ranks)
            return 0.0

    visited: list[int] = []
    curve(1000, Counting())
    assert visited == list(range(1, 1002))


def test_ring_sends_at_most_two_vectors_for_any_number_of_ranks() -> None:
    ring = RingCost(per_byte_s=1e-6)
    assert [ring_share(ranks) for ranks in (0, 1, 2, 4)] == [0, 0, 1, 1.5]
    assert ring.at(1000, 1) == 0
    assert ring.at(1000, 1000) == pytest.approx(0.002, rel=0.01)


def test_nodes_are_worth_it_from_the_first_that_adds_enough() -> None:
    judged = verdict(10)
    assert judged.is_worth_it
    assert (judged.num_nodes, judged.worth_from, judged.useful_nodes) == (10, 1, 10)
    assert judged.least_energy_nodes is None


def test_sum_that_costs_more_than_the_nodes_add_is_not_worth_it() -> None:
    judged = verdict(3, CollectiveCost(fixed_s=0.5))
    assert judged.reasons == (Reason.SLOWER,)
    assert judged.worth_from is None


def test_few_percent_are_not_worth_it() -> None:
    judged = verdict(1, CollectiveCost(fixed_s=0.06))
    assert judged.reasons == (Reason.LITTLE_GAIN,)


def test_first_node_may_cost_more_than_it_adds_and_later_ones_pay() -> None:
    judged = verdict(20, CollectiveCost(fixed_s=0.5))
    assert judged.is_worth_it
    assert judged.worth_from == 6  # 160 samples in 1.5 s
    assert judged.useful_nodes == 20


def test_verdict_names_the_number_beyond_which_the_sum_outweighs_a_node() -> None:
    # Rates go towards 10 / 0.05 = 200 samples/s: each node adds less than the one before.
    judged = verdict(200, CollectiveCost(per_rank_s=0.05))
    points = curve(200, CollectiveCost(per_rank_s=0.05))
    added = [after.samples_per_s - before.samples_per_s for before, after in itertools.pairwise(points)]
    assert 0 < judged.useful_nodes < 200
    assert added[judged.useful_nodes - 1] >= 1 > added[judged.useful_nodes]


def test_nodes_that_draw_more_than_they_save_are_not_worth_it() -> None:
    judged = verdict(10, power=Power(100, 20))
    assert judged.reasons == (Reason.NO_ENERGY_SAVED,)
    assert judged.least_energy_nodes == 0
    assert verdict(10, power=Power(100, 5)).is_worth_it


def test_verdict_names_the_number_with_the_least_energy() -> None:
    judged = verdict(200, CollectiveCost(per_rank_s=0.02), Power(300, 5))
    energies = [
        point.joules_per_image for point in curve(200, CollectiveCost(per_rank_s=0.02), Power(300, 5))
    ]
    assert judged.least_energy_nodes == energies.index(min(filter(None, energies)))
    assert 0 < judged.least_energy_nodes < 200


def test_host_alone_has_no_verdict_on_a_curve() -> None:
    with pytest.raises(ValueError, match="has no verdict"):
        verdict(0)


def test_verdict_on_some_numbers_of_nodes_covers_those_in_between() -> None:
    cost = CollectiveCost(per_rank_s=0.01)
    power = Power(100.0, 1.0)
    every = curve(60, cost, power)
    some = [every[number] for number in (*range(0, 60, 4), 60)]
    whole, thinned = judge(every, [NODE]), judge(some, [NODE])
    assert thinned.reasons == whole.reasons
    assert abs(thinned.useful_nodes - whole.useful_nodes) <= 4
    assert thinned.worth_from is not None
    assert whole.worth_from is not None
    assert 0 <= thinned.worth_from - whole.worth_from < 4
    assert thinned.least_energy_nodes is not None
    assert whole.least_energy_nodes is not None
    assert abs(thinned.least_energy_nodes - whole.least_energy_nodes) < 4
