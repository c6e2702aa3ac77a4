"""Which rank held the others back: series with one known fault each."""

from dataclasses import replace

import pytest

from csdctl.reporting.series import KINDS, RunSeries, find_bottleneck

NODES = ("host", "csd0", "csd1")
Spent = dict[str, float]
QUICK: Spent = {"compute": 0.3, "input": 0.05, "wait": 0.6, "communication": 0.05, "other": 0.0}
SLOW: Spent = {"compute": 0.9, "input": 0.05, "wait": 0.0, "communication": 0.05, "other": 0.0}


def series(*ranks: list[Spent], samples: float = 100.0) -> RunSeries:
    """A run with an interval of 1 s for each item of a rank."""
    spent = tuple({kind: [second[kind] for second in rank] for kind in KINDS} for rank in ranks)
    counts = tuple([samples] * len(rank) for rank in ranks)
    return RunSeries(NODES, 0.0, 40.0, 1.0, spent, counts)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([QUICK, QUICK, SLOW], (2, "compute", 0, 24, "smaller one")),
        ([QUICK, {**SLOW, "compute": 0.3, "input": 0.65}, QUICK], (1, "input", 0, 24, "reading samples")),
        ([{**QUICK, "wait": 0.02, "communication": 0.6}] * 3, (None, "link", 0, 24, "communication")),
    ],
)
def test_rank_that_held_the_others_back_all_the_time(
    ranks: list[Spent], expected: tuple[int | None, str, float, float, str]
) -> None:
    """A batch that is too large, a disk, and a slow link, which is no rank's own fault."""
    bottleneck = find_bottleneck(series(*([rank] * 40 for rank in ranks)))
    assert bottleneck is not None
    rank, cause, since_s, lost_s, why = expected
    assert (bottleneck.rank, bottleneck.cause, bottleneck.since_s) == (rank, cause, since_s)
    assert bottleneck.lost_s == pytest.approx(lost_s)
    assert why in bottleneck.why


def test_rank_that_became_slow_is_blamed_since_then() -> None:
    early = {**QUICK, "wait": 0.0}
    run = series([EVEN] * 20 + [QUICK] * 20, [EVEN] * 20 + [QUICK] * 20, [early] * 20 + [SLOW] * 20)
    bottleneck = find_bottleneck(run)
    assert bottleneck is not None
    assert (bottleneck.rank, bottleneck.since_s) == (2, 20)
    assert "3.00 times" in bottleneck.why
    hot = find_bottleneck(replace(run, hottest_c={2: 91.0}))
    assert hot is not None
    assert hot.cause == "heat"


EVEN = {**SLOW, "wait": 0.01}


def test_balanced_run_has_no_culprit() -> None:
    assert find_bottleneck(series([EVEN] * 10, [EVEN] * 10, [EVEN] * 10)) is None


def test_who_holds_the_others_back_now_is_not_who_did_before() -> None:
    balanced, quick = {**SLOW, "wait": 0.0}, QUICK
    run = series(
        [quick] * 40,
        [SLOW] * 30 + [quick] * 10,
        [quick] * 30 + [balanced] * 10,
    )
    before, now = find_bottleneck(run), find_bottleneck(run, is_now=True)
    assert before is not None
    assert now is not None
    assert before.rank == 1
    assert (now.rank, now.since_s) == (2, 30)
    assert "3.00 times" in now.why
