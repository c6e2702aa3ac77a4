"""The fastest batch sizes within limits, and the default limits."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csdctl.perfmodel.prediction import RankModel, StepTime
from csdctl.tuning.search import Limits, default_limits, find_best
from csdctl.tuning.stannis import TuningError

HOST = RankModel("host", StepTime(0.01, 0.003), is_required=True)
NODES = [RankModel(f"csd{number}", StepTime(0.03, 0.02)) for number in range(4)]
FLEET = [HOST, *NODES]


def free(_: int) -> float:
    return 0.0


@st.composite
def fleets(draw: st.DrawFn) -> list[RankModel]:
    kinds = [
        StepTime(draw(st.floats(0, 0.2)), draw(st.floats(0.001, 0.1))) for _ in range(draw(st.integers(1, 4)))
    ]
    nodes = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    return [
        RankModel(f"n{number}", step_time, is_required=number == 0) for number, step_time in enumerate(nodes)
    ]


def exhaustive(fleet: list[RankModel], most: int, sum_s: float) -> float:
    """The best of all plans in which every rank takes the largest batch within some time."""
    times = {candidate.step_time.at(size) for candidate in fleet for size in range(1, most + 1)}
    best = 0.0
    for time_s in times:
        sizes = [candidate.step_time.largest_within(time_s) for candidate in fleet]
        if min(sizes) >= 1 and sum(sizes) <= most:
            slowest = max(candidate.step_time.at(size) for candidate, size in zip(fleet, sizes, strict=True))
            best = max(best, sum(sizes) / (slowest + sum_s))
    return best


@given(fleet=fleets(), most=st.integers(16, 200), sum_s=st.floats(0, 0.5))
@settings(max_examples=60, deadline=None)
def test_best_plan_is_as_fast_as_the_best_of_all(fleet: list[RankModel], most: int, sum_s: float) -> None:
    wanted = exhaustive(fleet, most, sum_s)
    if not wanted:
        return
    found = find_best(fleet, Limits(max_global_batch=most), lambda _: sum_s)
    assert found.prediction.samples_per_s >= 0.97 * wanted
    assert sum(found.batch_sizes.values()) <= most


@pytest.mark.parametrize(
    ("good", "bad", "most"),
    [
        ((24, StepTime(0.03, 0.02)), (1, StepTime(2.0, 0.01)), 512),
        ((24, StepTime(0.03, 0.02)), (1, StepTime(0.5, 0.02)), 512),
        ((12, StepTime(0.03, 0.02)), (4, StepTime(0.5, 0.015)), 128),
        ((36, StepTime(0.03, 0.02)), (1, StepTime(3.0, 2.0)), 1024),
    ],
)
def test_slow_nodes_are_left_out_and_the_others_train(
    good: tuple[int, StepTime], bad: tuple[int, StepTime], most: int
) -> None:
    nodes = [
        RankModel(f"{name}{number}", step_time)
        for name, (count, step_time) in (("good", good), ("bad", bad))
        for number in range(count)
    ]
    limits = Limits(max_global_batch=most)
    wanted = find_best([HOST, *nodes[: good[0]]], limits, free).prediction.samples_per_s
    assert find_best([HOST, *nodes], limits, free).prediction.samples_per_s >= 0.98 * wanted


@pytest.mark.parametrize(("count", "step_time", "most"), [(13, (1.0, 0.02), 128), (37, (0.1, 0.02), 256)])
def test_limit_is_as_fast_as_the_same_number_as_an_exact_batch(
    count: int, step_time: tuple[float, float], most: int
) -> None:
    fleet = [RankModel(f"n{number}", StepTime(*step_time), is_required=True) for number in range(count)]
    exact = find_best(fleet, Limits(global_batch=most), free).prediction.samples_per_s
    assert find_best(fleet, Limits(max_global_batch=most), free).prediction.samples_per_s >= 0.99 * exact


def test_no_rank_gets_more_than_the_largest_possible_batch() -> None:
    fleet = [replace(HOST, step_time=StepTime(0.01, 0.003, largest=17)), *NODES[:1]]
    assert find_best(fleet, Limits(max_global_batch=1000), free).batch_sizes["host"] == 17


@given(fleet=fleets(), exactly=st.integers(16, 500))
@settings(max_examples=60, deadline=None)
def test_exact_global_batch_is_respected(fleet: list[RankModel], exactly: int) -> None:
    found = find_best(fleet, Limits(global_batch=exactly), free)
    assert sum(found.batch_sizes.values()) == exactly


def test_smallest_of_equally_fast_batches_is_taken() -> None:
    """Without fixed costs and sums a larger batch gains nothing."""
    fleet = [RankModel("host", StepTime(0.0, 0.001)), RankModel("csd0", StepTime(0.0, 0.01))]
    found = find_best(fleet, Limits(max_global_batch=10_000), free)
    assert sum(found.batch_sizes.values()) < 1000


def test_node_that_costs_more_than_it_brings_is_left_out_unless_it_has_private_data() -> None:
    slow = RankModel("slow", StepTime(5.0, 1.0))
    found = find_best([HOST, NODES[0], slow], Limits(max_global_batch=512), lambda _: 0.01)
    assert found.left_out == ("slow",)
    assert set(found.batch_sizes) == {"host", "csd0"}
    found = find_best([HOST, replace(slow, is_required=True)], Limits(max_global_batch=512), lambda _: 0.01)
    assert found.batch_sizes["slow"] >= 1


def test_impossible_limits_are_an_error_that_names_them() -> None:
    required = [HOST, RankModel("csd0", StepTime(1.0, 1.0), is_required=True)]
    with pytest.raises(TuningError, match="no plan for 2 ranks satisfies max global batch 1") as raised:
        find_best(required, Limits(max_global_batch=1), free)
    assert "tune with another max_global_batch, or with fewer nodes" in str(raised.value)
    with pytest.raises(TuningError, match="must be at least 1") as raised:
        Limits(global_batch=-1)
    assert "change or omit global_batch" in str(raised.value)
    with pytest.raises(TuningError, match="5,000 samples exceeds an epoch of 1,000 samples"):
        default_limits(EXACTLY, 256, 1_000, 1)


EXACTLY = Limits(global_batch=5_000)


@pytest.mark.parametrize(
    ("given", "num_samples", "num_required", "expected"),
    [
        (Limits(), 1_000_000, 1, Limits(1024)),  # four reference batches
        (Limits(), None, 1, Limits(1024)),
        (Limits(), 1_000, 1, Limits(100)),  # ten steps of an epoch
        (Limits(), 50, 25, Limits(25)),  # a sample for each required rank
        (Limits(900), 1_000, 1, Limits(900)),
        (Limits(5_000), 1_000, 1, Limits(1_000)),
        (EXACTLY, None, 1, EXACTLY),
    ],
)
def test_default_limits(given: Limits, num_samples: int | None, num_required: int, expected: Limits) -> None:
    assert default_limits(given, 256, num_samples, num_required) == expected
