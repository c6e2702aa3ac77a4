"""Which batch sizes the balancer tries and keeps, for simulated ranks."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.worker.protocol.events import COMPARED, KEPT, TAKEN_BACK, TRIED
from csdctl.worker.tasks.balancer import MAX_STEPS, MIN_STEPS, Balancer, Change, apportion_above

Sizes = dict[int, int]
Step = Callable[[Mapping[int, int]], tuple[dict[int, float], float]]
"""Takes batch sizes, returns the compute seconds of each rank and the duration of the step."""
OVERHEAD_S, SUM_S = 0.002, 0.002


@dataclass
class Ranks:
    """Ranks of constant speed in samples/s, with a fixed cost of each step and relative noise."""

    speeds: dict[int, float]
    noise: float = 0.0
    noise_source: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, sizes: Mapping[int, int]) -> tuple[dict[int, float], float]:
        times = {
            rank: (OVERHEAD_S + size / self.speeds[rank]) * max(0.1, self.noise_source.gauss(1, self.noise))
            for rank, size in sizes.items()
        }
        return times, max(times.values()) + SUM_S


@dataclass
class QuotaRanks:
    """Ranks that compute at 1,500 samples/s until their share of a period is used up (the kernel's CFS)."""

    shares: dict[int, float]
    period_s: float
    noise_source: random.Random
    now: float = 0.0

    def __post_init__(self) -> None:
        self.left = {rank: (0.0, share * self.period_s) for rank, share in self.shares.items()}

    def __call__(self, sizes: Mapping[int, int]) -> tuple[dict[int, float], float]:
        times = {rank: self.compute(rank, size) - self.now for rank, size in sizes.items()}
        duration = max(times.values()) + 2 * SUM_S
        self.now += duration
        return times, duration

    def compute(self, rank: int, size: int) -> float:
        """Return when `rank` has computed `size` samples."""
        cpu_s, at, (began, quota_s) = (
            size / 1500 * self.noise_source.gauss(1, 0.05),
            self.now,
            self.left[rank],
        )
        while cpu_s > 1e-9:
            if at >= began + self.period_s - 1e-12:
                began += self.period_s * math.floor((at - began) / self.period_s + 1e-9)
                quota_s = self.shares[rank] * self.period_s
            used = min(cpu_s, quota_s, began + self.period_s - at)
            at, cpu_s, quota_s = at + used, cpu_s - used, quota_s - used
            if cpu_s > 1e-9 and quota_s <= 1e-9:
                at = began + self.period_s
        self.left[rank] = began, quota_s
        return at


def run(
    sizes: Sizes, step: Step, num_steps: int, balancer: Balancer | None = None
) -> tuple[Sizes, float, list[Change]]:
    """Return the batch sizes after steps, their duration, and the changes."""
    duration, previous, changes = 0.0, 0.0, list[Change]()
    for _ in range(num_steps):
        times, step_s = step(sizes)
        duration += step_s
        if balancer:
            balancer.observe(times, previous)
            if change := balancer.decide(sizes):
                assert sum(change.batch_sizes.values()) == sum(sizes.values())
                changes.append(change)
                sizes = change.batch_sizes
        previous = step_s
    return sizes, duration, changes


def step_s(sizes: Sizes, speeds: dict[int, float]) -> float:
    return Ranks(speeds)(sizes)[1]


@pytest.mark.fault(51)
def test_node_halved_in_speed_gets_a_smaller_batch_within_twenty_steps() -> None:
    slow = {0: 200.0, 1: 50.0, 2: 25.0, 3: 50.0}
    before = {0: 400, 1: 100, 2: 100, 3: 100}
    after, _, _ = run(before, Ranks(slow, 0.03), 20, Balancer({}))
    best, _, _ = run(after, Ranks(slow, 0.01), 500, Balancer({}))
    assert step_s(after, slow) <= step_s(best, slow) / 0.95
    assert step_s(after, slow) < step_s(before, slow) / 1.5


@pytest.mark.parametrize("wrong", [1.3, 0.7])
@pytest.mark.parametrize("length", [0.02, 0.06, 0.2])
def test_wrong_batch_sizes_are_corrected_within_thirty_steps_at_every_length(
    length: float, wrong: float
) -> None:
    speeds = {0: 30_000.0, 1: 10_000.0, 2: 10_000.0}
    ideal = {rank: round(speed * length) for rank, speed in speeds.items()}
    host = round(ideal[0] * wrong)
    rest = sum(ideal.values()) - host
    sizes = {0: host, 1: rest // 2, 2: rest - rest // 2}
    after, _, changes = run(sizes, Ranks(speeds, 0.02), 30, Balancer({}))
    assert KEPT in [change.outcome for change in changes]
    assert step_s(ideal, speeds) / step_s(after, speeds) >= 0.95


def test_comparison_ends_once_the_difference_is_certain() -> None:
    """Its steps have the batch sizes that are wrong."""
    ranks, sizes = Ranks({0: 3000, 1: 3000}, noise=0.08), {0: 75, 1: 45}
    balancer, lengths, previous = Balancer({0: 1000, 1: 1000}), dict[str, int](), 0.0
    begun = 0
    for step in range(200):
        times, duration = ranks(sizes)
        balancer.observe(times, previous)
        previous = duration
        if change := balancer.decide(sizes):
            lengths.setdefault(change.outcome, step - begun)
            sizes, begun = change.batch_sizes, step
    assert lengths[COMPARED] > 2 * lengths[KEPT]
    assert abs(sizes[0] - sizes[1]) < 15


def test_change_that_makes_steps_longer_is_taken_back_and_not_tried_again() -> None:
    """The host computes longest, but steps get longer with other sizes, as on cores that ranks share."""
    planned = {0: 60, 1: 20, 2: 20}

    def step(sizes: Mapping[int, int]) -> tuple[dict[int, float], float]:
        times = {0: 0.06, 1: 0.05, 2: 0.05}
        return times, 0.07 if sizes == planned else 0.08

    after, _, changes = run(planned, step, 2000, Balancer({}))
    assert after == planned
    assert {change.outcome for change in changes} == {TRIED, TAKEN_BACK}
    sizes = [change.batch_sizes for change in changes if change.outcome == TRIED]
    assert 1 <= len(sizes) <= 3, "a change that fails is tried at half its size, then not again"
    moved = [sum(abs(size - planned[rank]) for rank, size in tried.items()) for tried in sizes]
    assert moved == sorted(moved, reverse=True)


def test_change_is_tried_again_when_the_imbalance_has_grown() -> None:
    planned = {0: 60, 1: 20, 2: 20}
    slow_s = 0.06

    def step(sizes: Mapping[int, int]) -> tuple[dict[int, float], float]:
        times = {0: slow_s * sizes[0] / 60, 1: 0.05, 2: 0.05}
        is_better = slow_s > 0.06 and sizes != planned
        return times, 0.07 if sizes == planned or is_better else 0.08

    balancer = Balancer({})
    _, _, changes = run(planned, step, 1000, balancer)
    assert {change.outcome for change in changes} == {TRIED, TAKEN_BACK}
    slow_s = 0.12
    _, _, changes = run(planned, step, 200, balancer)
    assert changes[0].outcome == TRIED


@pytest.mark.parametrize("period_s", [0.006, 0.1])
@pytest.mark.parametrize("length", [0.06, 0.085, 0.226, 1.0])
def test_ranks_with_quotas_are_hardly_slower_with_trials_whatever_their_quota_hides(
    length: float, period_s: float
) -> None:
    shares = {0: 1.0, 1: 0.22, 2: 0.22, 3: 0.22}
    sizes = {rank: round(1500 * length * share * (0.9 if rank == 0 else 1)) for rank, share in shares.items()}
    for seed in range(5):
        _, without_s, _ = run(sizes, QuotaRanks(shares, period_s, random.Random(seed)), 300)
        _, with_s, _ = run(sizes, QuotaRanks(shares, period_s, random.Random(seed)), 300, Balancer({}))
        assert with_s < 1.03 * without_s


def test_steps_of_balanced_ranks_are_no_longer_with_trials_whatever_the_noise() -> None:
    speeds = {0: 3000.0, 1: 1000.0, 2: 1000.0}
    sizes = {0: 180, 1: 60, 2: 60}
    for seed in range(10):
        after, with_s, _ = run(sizes, Ranks(speeds, 0.1, random.Random(seed)), 400, Balancer({}))
        _, without_s, _ = run(sizes, Ranks(speeds, 0.1, random.Random(seed + 100)), 400)
        assert with_s < 1.03 * without_s
        assert step_s(after, speeds) < 1.12 * step_s(sizes, speeds)


EVEN = {0: 1.0, 1: 1.0}
UNEVEN: dict[str, tuple[Sizes, list[dict[int, float]]]] = {
    "one slow step": ({0: 100, 1: 100}, [{0: 1.0, 1: 9.0}, *[EVEN] * MIN_STEPS]),
    "times that cannot be": (
        {0: 100, 1: 100, 2: 100},
        [{**EVEN, 2: wrong} for wrong in (math.nan, math.inf, -math.inf, -1e9, 1e9) for _ in range(20)],
    ),
}


@pytest.mark.parametrize(("sizes", "steps"), UNEVEN.values(), ids=UNEVEN)
def test_batch_sizes_stay_where_no_rank_is_surely_slower(sizes: Sizes, steps: list[dict[int, float]]) -> None:
    balancer = Balancer({})
    for step in [EVEN, EVEN, *steps]:
        balancer.observe(step, 1.1)
        assert balancer.decide(sizes) is None


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, -1.0, 0.0, 1e9])
def test_durations_that_cannot_be_end_no_trial(duration_s: float) -> None:
    balancer, sizes = Balancer({}), {0: 100, 1: 100}
    for _ in range(2 * MAX_STEPS):
        balancer.observe({0: 1.0, 1: 2.0}, duration_s)
        assert balancer.decide(sizes) is None


@given(st.lists(st.floats(), min_size=3, max_size=3), st.integers(1, 400))
def test_whatever_a_node_says_batch_sizes_stay_within_their_limits(claims: list[float], limit: int) -> None:
    sizes = {0: 100, 1: 50, 2: 50}
    limits = {0: 100 + limit, 1: 50 + limit, 2: 50 + limit}
    balancer = Balancer(limits)
    for step in range(40):
        balancer.observe({0: 1.0, 1: 1.0, 2: claims[step % 3]}, 1.0)
        if change := balancer.decide(sizes):
            assert sum(change.batch_sizes.values()) == 200
            assert all(1 <= size <= limits[rank] for rank, size in change.batch_sizes.items())
            sizes = change.batch_sizes


def test_batch_sizes_return_when_a_slowdown_ends() -> None:
    speeds = {0: 100.0, 1: 100.0}
    balancer = Balancer({})
    slow, _, _ = run({0: 200, 1: 200}, Ranks({**speeds, 1: 40.0}, 0.02), 30, balancer)
    assert slow[1] < 130
    after, _, _ = run(slow, Ranks(speeds, 0.02), 200, balancer)
    assert abs(after[1] - 200) < 20


def test_open_trial_is_taken_back_when_ranks_change() -> None:
    balancer, planned = Balancer({}), {0: 100, 1: 100}
    assert balancer.forget() == {}
    sizes = planned
    for _ in range(2 * MIN_STEPS):
        balancer.observe({0: 1.0, 1: 2.0}, 2.0)
        sizes = change.batch_sizes if (change := balancer.decide(sizes)) else sizes
        if sizes != planned:
            break
    assert sizes != planned
    assert balancer.forget() == planned
    assert balancer.forget() == {}


@pytest.mark.parametrize("least", [{1: 80}, {0: 5, 1: 80}, {1: 199}])
def test_no_rank_gets_fewer_samples_than_its_private_ones_need(least: Sizes) -> None:
    balancer, sizes = Balancer({}), {0: 100, 1: 100, 2: 100}
    for _ in range(MAX_STEPS):
        balancer.observe({0: 1.0, 1: 3.0, 2: 1.0}, 3.0)
        if change := balancer.decide(sizes, lambda: least):
            assert change.batch_sizes[1] >= least[1]
            assert sum(change.batch_sizes.values()) == 300
            return
    assert least[1] > 100


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(st.floats(0.1, 1e4), st.integers(0, 60)), min_size=1),
    st.integers(1, 300),
)
def test_samples_above_the_least_are_divided_or_none(ranks: dict[int, tuple[float, int]], total: int) -> None:
    least = {rank: smallest for rank, (_, smallest) in ranks.items()}
    sizes = apportion_above(least, total, {rank: speed for rank, (speed, _) in ranks.items()}, {})
    if sizes:
        assert sum(sizes.values()) == total
        assert all(size >= max(1, least[rank]) for rank, size in sizes.items())
    else:
        assert sum(max(1, smallest) for smallest in least.values()) >= total


def test_failed_change_of_one_rank_does_not_hide_another_slow_rank() -> None:
    planned = {0: 60, 1: 20, 2: 20}
    times, shortest = {0: 0.06, 1: 0.05, 2: 0.05}, [0.07]

    def step(sizes: Mapping[int, int]) -> tuple[dict[int, float], float]:
        return dict(times), shortest[0] if sizes == planned else 0.08

    balancer = Balancer({})
    run(planned, step, 1000, balancer)
    times[2] = 0.062
    _, _, changes = run(planned, step, 100, balancer)
    assert [change.slowest for change in changes][:1] == [2]


def test_ranks_that_are_slowest_in_turn_do_not_make_failed_changes_new_ones() -> None:
    planned, slowest = {0: 60, 1: 20, 2: 20}, random.Random(0)

    def step(sizes: Mapping[int, int]) -> tuple[dict[int, float], float]:
        if slowest.random() < 0.02:
            slow[:] = [slowest.choice([0, 1, 2]), slowest.uniform(0.06, 0.1)]
        times = {rank: slow[1] if rank == slow[0] else 0.05 for rank in planned}
        return times, 0.12 if sizes == planned else 0.15

    slow = [0, 0.06]
    after, _, changes = run(planned, step, 20_000, Balancer({}))
    assert after == planned
    tried = [change for change in changes if change.outcome == TRIED]
    assert len(tried) <= 2 * 3 * len(planned), "at most two series of three for each rank"


def test_no_trial_begins_where_none_may() -> None:
    balancer, sizes = Balancer({}), {0: 100, 1: 100}
    for _ in range(MAX_STEPS):
        balancer.observe({0: 1.0, 1: 2.0}, 2.0)
        assert balancer.decide(sizes, may_try=False) is None


def test_rank_that_sits_out_gets_no_samples_when_another_becomes_slow() -> None:
    sizes, _, _ = run({0: 0, 1: 100, 2: 100}, Ranks({0: 1e9, 1: 100.0, 2: 50.0}), 30, Balancer({}))
    assert sizes[0] == 0
    assert sizes[1] > 120 > sizes[2]
