"""A run of two ranks over time: their reports, the rest at the end of an epoch, a lost node."""

import pytest

from csdctl.reporting.series import (
    COMMUNICATION,
    COMPUTE,
    INPUT,
    MAX_FAULTS,
    MAX_INTERVALS,
    MAX_POINTS,
    OTHER,
    WAIT,
    RunSeries,
    SeriesBuilder,
)
from csdctl.worker.protocol.events import EpochEnd, Event, Failed, Joined, LinkLost, NodeLost, Progress, Ready

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


def joined(rank: int, sizes: dict[str, int]) -> Joined:
    return Joined(rank, NODES[rank], 1, 1, 0, 10, 0, sizes, "star", 0.01)


def series(*events: tuple[float, Event]) -> RunSeries:
    builder = SeriesBuilder(NODES)
    for time_s, event in events:
        builder.add(time_s, event)
    return builder.build()


def test_time_of_a_rank_is_divided_by_kind() -> None:
    spent = series((100.0, Ready(1, "csd0", 10, 1.0)), (101.5, progress(1))).spent_s[1]
    found = {kind: sum(values) for kind, values in spent.items()}
    assert found == pytest.approx({COMPUTE: 0.4, INPUT: 0.1, WAIT: 0.3, COMMUNICATION: 0.1, OTHER: 0.1})
    assert spent[COMPUTE] == pytest.approx([0.2, 0.2])  # half of it in each second


def test_end_of_an_epoch_adds_what_was_not_reported_before() -> None:
    run = series((100.0, Ready(1, "csd0", 10, 1.0)), (101.0, progress(1)), (102.0, epoch_end(1)))
    assert sum(run.samples[1]) == pytest.approx(100)
    assert sum(run.spent_s[1][WAIT]) == pytest.approx(0.6)
    assert run.cpu_s == pytest.approx({1: 1.5})


def test_report_that_arrived_late_counts_when_it_was_made() -> None:
    run = series((100.0, Ready(1, "csd0", 10, 1.0)), (101.0, progress(1)), (109.0, progress(1)))
    assert run.samples[1] == pytest.approx([50, 50, 0])


def test_lost_node_costs_the_time_until_the_ranks_train_again() -> None:
    run = series(
        (100.0, joined(0, {"0": 4, "1": 2})),
        (110.0, LinkLost(0, "host", 1, 1, 5)),
        (112.0, NodeLost(1, "csd0", "no answer")),
        (115.0, joined(0, {"0": 4})),
    )
    assert [(fault.node, fault.what, fault.stopped_s) for fault in run.faults] == [
        ("csd0", "lost: no answer", 5.0)
    ]
    assert [change.sizes for change in run.batch_sizes] == [{0: 4, 1: 2}, {0: 4}]


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
    assert run.num_more_faults == 3
