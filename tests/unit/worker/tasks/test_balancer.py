"""What the balancer proposes for ranks of known speed."""

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.worker.tasks.balancer import MIN_STEPS, Balancer

OVERHEAD_S = 0.05


def times(
    sizes: Mapping[int, int], speeds: Mapping[int, float], noise: random.Random | None = None
) -> dict[int, float]:
    """Compute seconds of a step: an overhead, and a time a sample."""
    return {
        rank: (OVERHEAD_S + size / speeds[rank]) * (noise.uniform(0.95, 1.05) if noise else 1.0)
        for rank, size in sizes.items()
    }


def balanced(
    sizes: dict[int, int], speeds: Mapping[int, float], num_steps: int, seed: int = 0
) -> dict[int, int]:
    """Batch sizes after `num_steps` steps at these speeds."""
    balancer, noise = Balancer({}), random.Random(seed)
    for _ in range(num_steps):
        balancer.observe(times(sizes, speeds, noise))
        proposal = balancer.propose(sizes)
        if proposal:
            sizes = proposal
            balancer.forget()
    return sizes


def rate(sizes: Mapping[int, int], speeds: Mapping[int, float]) -> float:
    return sum(sizes.values()) / max(times(sizes, speeds).values())


@pytest.mark.fault(51)
def test_node_halved_in_speed_gets_a_smaller_batch_within_twenty_steps() -> None:
    speeds = {0: 200.0, 1: 50.0, 2: 50.0, 3: 50.0}
    sizes = {0: 400, 1: 100, 2: 100, 3: 100}
    slow = {**speeds, 2: 25.0}
    corrected = balanced(sizes, slow, 20)
    assert sum(corrected.values()) == 700
    best = balanced(corrected, slow, 200)
    assert rate(corrected, slow) >= 0.95 * rate(best, slow)
    assert rate(corrected, slow) > 1.5 * rate(sizes, slow)


def test_batch_sizes_of_balanced_ranks_stay_whatever_the_noise() -> None:
    speeds = {0: 200.0, 1: 50.0, 2: 50.0}
    sizes = {0: 406, 1: 100, 2: 100}
    for seed in range(20):
        assert balanced(dict(sizes), speeds, 60, seed) == sizes


EVEN = {0: 1.0, 1: 1.0}
UNEVEN: dict[str, tuple[dict[int, int], list[dict[int, float]]]] = {
    "one slow step": ({0: 100, 1: 100}, [{0: 1.0, 1: 9.0}, *[EVEN] * MIN_STEPS]),
    "a scheduler's slice": ({0: 299, 1: 64, 2: 68}, [{0: 0.070, 1: 0.058, 2: 0.057}] * 500),
    "times that cannot be": (
        {0: 100, 1: 100, 2: 100},
        [{**EVEN, 2: wrong} for wrong in (math.nan, math.inf, -math.inf, -1e9, 1e9) for _ in range(20)],
    ),
}


@pytest.mark.parametrize(("sizes", "steps"), UNEVEN.values(), ids=UNEVEN)
def test_batch_sizes_stay_where_no_rank_is_surely_slower(
    sizes: dict[int, int], steps: list[dict[int, float]]
) -> None:
    balancer = Balancer({})
    balancer.observe(steps[-1])
    for step in steps:
        balancer.observe(step)
        assert balancer.propose(sizes) is None


@given(st.lists(st.floats(), min_size=3, max_size=3), st.integers(1, 400))
def test_whatever_a_node_says_batch_sizes_stay_within_their_limits(claims: list[float], limit: int) -> None:
    sizes = {0: 100, 1: 50, 2: 50}
    limits = {0: 100 + limit, 1: 50 + limit, 2: 50 + limit}
    balancer = Balancer(limits)
    for step in range(40):
        balancer.observe({0: 1.0, 1: 1.0, 2: claims[step % 3]})
        if proposal := balancer.propose(sizes):
            assert sum(proposal.values()) == 200
            assert all(1 <= size <= limits[rank] for rank, size in proposal.items())


def test_batch_sizes_return_when_a_slowdown_ends() -> None:
    speeds = {0: 100.0, 1: 100.0}
    slow = balanced({0: 200, 1: 200}, {**speeds, 1: 40.0}, 30)
    assert slow[1] < 130
    assert abs(balanced(slow, speeds, 60)[1] - 200) < 20


def test_rank_that_sits_out_gets_no_samples_when_another_becomes_slow() -> None:
    sizes = balanced({0: 0, 1: 100, 2: 100}, {0: 1e9, 1: 100.0, 2: 50.0}, 30)
    assert sizes[0] == 0
    assert sizes[1] > 120 > sizes[2]
    assert sum(sizes.values()) == 200
