"""A run over time: the reports of its ranks, a lost node, and which rank held the others back."""

from dataclasses import replace

import pytest

from csdctl.reporting.series import (
    COMMUNICATION,
    COMPUTE,
    INPUT,
    KINDS,
    MAX_FAULTS,
    MAX_INTERVALS,
    MAX_POINTS,
    OTHER,
    WAIT,
    RunSeries,
    SeriesBuilder,
    find_bottleneck,
)
from csdctl.worker.protocol.events import EpochEnd, Event, Failed, Joined, NodeBack, NodeLost, Progress, Ready

NODES = ("host", "csd0")


def progress(rank: int, wall_s: float = 1.0, **fields: float) -> Progress:
    times = {"compute_s": 0.5, "wait_s": 0.4, "input_s": 0.1, "others_s": 0.3, "cpu_s": 0.6} | fields
    return Progress(rank, NODES[rank], 1, 5, steps=5, samples=50, wall_s=wall_s, **times)


def epoch_end(rank: int, epoch: int = 1) -> EpochEnd:
    return EpochEnd(
        *(rank, NODES[rank], epoch, 10, 100, 1.0, 0.8, 2.0, "hash"),
        global_samples=200 if rank == 0 else 0,
        loss=1.5 if rank == 0 else None,
        validation_loss=1.25 if rank == 0 else None,
        input_s=0.2,
        others_s=0.6,
        cpu_s=1.5,
    )


def joined(sizes: dict[str, int], *, is_start: bool = True) -> Joined:
    return Joined(0, "host", 1, 0, 10, 0, sizes, is_start)


def series(*events: tuple[float, Event]) -> RunSeries:
    builder = SeriesBuilder(NODES)
    for time_s, event in events:
        builder.add(time_s, event)
    return builder.build()


def test_time_of_a_rank_is_divided_by_kind() -> None:
    spent = series((100.0, Ready(1, "csd0", 10)), (101.5, progress(1))).spent_s[1]
    total_s = {kind: sum(values) for kind, values in spent.items()}
    assert total_s == pytest.approx({COMPUTE: 0.4, INPUT: 0.1, WAIT: 0.3, COMMUNICATION: 0.1, OTHER: 0.1})
    assert spent[COMPUTE] == pytest.approx([0.2, 0.2])  # half of it in each second


def test_time_that_was_divided_before_a_rank_did_not_divide_its_own_is_counted_with_the_other() -> None:
    undivided = replace(progress(0), others_s=None, input_s=None)
    built = series((100.0, Ready(1, "csd0", 10)), (101.5, progress(1)), (101.5, undivided))
    assert not built.is_wait_divided
    for spent in built.spent_s:
        total_s = {kind: sum(values) for kind, values in spent.items()}
        assert total_s == pytest.approx({COMPUTE: 0.5, INPUT: 0.0, WAIT: 0.4, COMMUNICATION: 0.0, OTHER: 0.1})


def test_end_of_an_epoch_adds_what_was_not_reported_before() -> None:
    run = series((100.0, Ready(1, "csd0", 10)), (101.0, progress(1)), (102.0, epoch_end(1)))
    assert sum(run.samples[1]) == pytest.approx(100)
    assert sum(run.spent_s[1][WAIT]) == pytest.approx(0.6)
    assert run.cpu_s == pytest.approx({1: 1.5})
    late = series((100.0, Ready(1, "csd0", 10)), (101.0, progress(1)), (109.0, progress(1)))
    assert late.samples[1] == pytest.approx([50, 50, 0]), "a report that arrives late counts when it was made"


def test_report_of_a_rank_that_is_back_counts_when_it_was_made() -> None:
    back = joined({"0": 4, "1": 2}, is_start=False), joined({"0": 4, "1": 2})
    for again in back:
        run = series(
            (100.0, joined({"0": 4, "1": 2})),
            (101.0, progress(1)),
            (102.0, joined({"0": 4}, is_start=False)),
            (107.0, again),
            (108.0, progress(1)),
        )
        assert run.samples[1][:8] == pytest.approx([50, 0, 0, 0, 0, 0, 0, 50])


def test_lost_node_costs_the_others_no_time_and_lost_rank_0_all_until_it_begins_again() -> None:
    run = series(
        (100.0, joined({"0": 4, "1": 2})),
        (112.0, NodeLost(1, "csd0", "no answer")),
        (115.0, joined({"0": 4}, is_start=False)),
        (130.0, joined({"0": 4, "1": 2}, is_start=False)),
        (130.5, NodeBack(1, "csd0")),
        (140.0, NodeLost(0, "host", "killed")),
        (145.0, joined({"0": 4})),
        (146.0, joined({"0": 4, "1": 2}, is_start=False)),
    )
    assert [(fault.node, fault.what, fault.stopped_s) for fault in run.faults] == [
        ("csd0", "lost: no answer", None),
        ("csd0", "back", None),
        ("host", "lost: killed", 5.0),
    ]


def test_clock_that_is_set_back_while_the_ranks_wait_leaves_the_cost_unknown() -> None:
    run = series(
        (5000.0, joined({"0": 4, "1": 2})),
        (5010.0, NodeLost(0, "host", "no answer")),
        (1415.0, joined({"0": 4, "1": 2})),
    )
    assert [fault.stopped_s for fault in run.faults] == [None]


def test_evaluation_has_no_throughput() -> None:
    steps = replace(progress(0), global_samples=50, input_s=2.5, others_s=None)
    end = replace(
        epoch_end(0), steps=5, samples=50, stepped_samples=50, compute_s=0.500001, wait_s=0.4, wall_s=5.0
    )
    run = series((100.0, joined({"0": 4})), (101.0, steps), (105.0, end))
    rates = [rate for rate in run.throughputs() if rate is not None]
    assert rates
    assert min(rates) > 50
    assert sum(run.spent_s[0][INPUT]) == 0.0, "of a split: it is in computing"


def test_time_between_the_end_of_a_run_and_its_resume_is_no_training() -> None:
    first, again = joined({"0": 4}), joined({"0": 4}, is_start=False)
    of_first = [(100.0, first), (101.0, progress(0)), (103.0, again), (105.0, progress(0))]
    run = series(*of_first, (900.0, first), (901.0, progress(1)), (902.0, progress(0)))
    assert run.trained == [(100.0, 105.0), (900.0, 902.0)]


def test_epochs_keep_results_of_training_and_validation() -> None:
    (epoch,) = series((100.0, epoch_end(0))).epochs
    assert epoch.results == {"loss": 1.5, "val_loss": 1.25}
    assert epoch.samples_per_s == pytest.approx(200 / 1.8)


def test_long_run_keeps_few_points() -> None:
    many = [(100.0 + 2 * n, epoch_end(0, n + 1)) for n in range(5000)]
    failures = [(20000.0, Failed(1, "csd0", "again")) for _ in range(MAX_FAULTS + 3)]
    run = series(*many, *failures)
    assert len(run.epochs) <= MAX_POINTS + 1
    assert run.epochs[-1].epoch == 5000
    assert run.num_intervals <= MAX_INTERVALS
    assert sum(run.samples[0]) == pytest.approx(500_000)
    assert len(run.faults) == MAX_FAULTS


THREE = ("host", "csd0", "csd1")
Spent = dict[str, float]
QUICK: Spent = {"compute": 0.3, "input": 0.05, "wait": 0.6, "communication": 0.05, "other": 0.0}
SLOW: Spent = {"compute": 0.9, "input": 0.05, "wait": 0.0, "communication": 0.05, "other": 0.0}


def series_of(*ranks: list[Spent], samples: float = 100.0) -> RunSeries:
    """A run with an interval of 1 s for each item of a rank."""
    spent = tuple({kind: [second[kind] for second in rank] for kind in KINDS} for rank in ranks)
    counts = tuple([samples] * len(rank) for rank in ranks)
    return RunSeries(THREE, 0.0, 1.0, spent, counts)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([QUICK, QUICK, SLOW], (2, "compute", 0, 24, "its batch takes longer")),
        ([QUICK, {**SLOW, "compute": 0.3, "input": 0.65}, QUICK], (1, "input", 0, 24, "reading samples")),
        ([{**QUICK, "wait": 0.02, "communication": 0.6}] * 3, (None, "link", 0, 24, "sums took")),
    ],
)
def test_rank_that_held_the_others_back_all_the_time(
    ranks: list[Spent], expected: tuple[int | None, str, float, float, str]
) -> None:
    """A batch that is too large, a disk, and a slow link, which is no rank's own fault."""
    bottleneck = find_bottleneck(series_of(*([rank] * 40 for rank in ranks)))
    assert bottleneck is not None
    rank, cause, since_s, lost_s, why = expected
    assert (bottleneck.rank, bottleneck.cause, bottleneck.since_s) == (rank, cause, since_s)
    assert bottleneck.lost_s == pytest.approx(lost_s)
    assert why in bottleneck.why


def test_link_for_which_most_sums_waited_is_named_with_its_rate() -> None:
    lost = {**QUICK, "wait": 0.02, "communication": 0.6}
    run = replace(series_of(*[[lost] * 40] * 3), links={1: (1.0, 50 << 20), 2: (20.0, 5 << 20)})
    bottleneck = find_bottleneck(run)
    assert bottleneck is not None
    assert (bottleneck.rank, bottleneck.cause, bottleneck.lost_s) == (2, "link", pytest.approx(24))
    assert "256 KiB/s both ways; sums took 62% of the time" in bottleneck.why
    assert (unknown := find_bottleneck(replace(run, links={1: (11.0, 1)})))
    assert unknown.rank is None, "a link that explains less than half of the time is not the cause"


def test_reports_of_the_slowest_link_add_up() -> None:
    report = replace(progress(0), slow_link=(1, 0.25, 1000))
    assert series((100.0, report), (101.0, report), (102.0, progress(0))).links == {1: (0.5, 2000)}


def test_rank_that_became_slow_is_blamed_since_then() -> None:
    early = {**QUICK, "wait": 0.0}
    run = series_of([EVEN] * 20 + [QUICK] * 20, [EVEN] * 20 + [QUICK] * 20, [early] * 20 + [SLOW] * 20)
    bottleneck = find_bottleneck(run)
    assert bottleneck is not None
    assert (bottleneck.rank, bottleneck.since_s) == (2, 20)
    assert "3.00 times" in bottleneck.why


EVEN = {**SLOW, "wait": 0.01}


def test_balanced_run_has_no_culprit() -> None:
    """Nor has one whose ranks wait for checkpoints of rank 0."""
    assert find_bottleneck(series_of([EVEN] * 10, [EVEN] * 10, [EVEN] * 10)) is None
    waiting = {**EVEN, "compute": 0.6, "communication": 0.35}
    saving = {**EVEN, "compute": 0.6, "other": 0.3}
    assert find_bottleneck(series_of([saving] * 10, [waiting] * 10, [waiting] * 10)) is None


def test_who_holds_the_others_back_now_is_not_who_did_before() -> None:
    balanced, quick = {**SLOW, "wait": 0.0}, QUICK
    run = series_of([quick] * 40, [SLOW] * 30 + [quick] * 10, [quick] * 30 + [balanced] * 10)
    before, now = find_bottleneck(run), find_bottleneck(run, is_now=True)
    assert before is not None
    assert now is not None
    assert before.rank == 1
    assert (now.rank, now.since_s) == (2, 30)
    assert "3.00 times" in now.why
