"""The time limits of supervision: which rank, group or run is overdue."""

import pytest

from csdctl.supervision.run_setup import Patience


def test_larger_group_may_take_longer_to_join() -> None:
    patience = Patience(join_s=60.0, join_per_rank_s=0.5)
    assert patience.join_limit_s(2) == 61.0
    assert patience.join_limit_s(36) == 78.0


@pytest.mark.parametrize(
    ("delays_s", "limit_s"), [([], 3.0), ([0.1, 0.5], 3.0), ([0.1, 1.5], 6.0), ([2.5], 8.0)]
)
def test_last_rank_gets_four_times_the_slowest_answer_within_limits(
    delays_s: list[float], limit_s: float
) -> None:
    assert Patience(answer_s=8.0, min_answer_s=3.0).last_answer_limit_s(delays_s) == limit_s


def test_only_ranks_pinged_too_long_ago_are_stalled() -> None:
    assert Patience(stall_s=20.0).stalled({1: 100.0, 2: 99.0, 3: 110.0}, now=120.0) == [2]


def test_quiet_rank_is_pinged_after_the_interval() -> None:
    patience = Patience(ping_interval_s=5.0)
    assert not patience.is_ping_due(100.0, now=105.0)
    assert patience.is_ping_due(100.0, now=105.1)


def test_run_is_silent_after_the_silence_deadline() -> None:
    patience = Patience(silence_s=300.0)
    assert not patience.is_silent(100.0, now=400.0)
    assert patience.is_silent(100.0, now=400.1)
