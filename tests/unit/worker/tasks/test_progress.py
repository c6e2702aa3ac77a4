"""What a run has done of an epoch, whatever changes midway, and what is forgotten at its end."""

from dataclasses import replace

import pytest

from csdctl.worker.engine.layout import Sums
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.progress import CallbackState, EpochTotals, RunProgress
from tests.unit.worker.tasks.verified_models import specs_of

ALL = (0, 1, 2)
NUM_STEPS = 8
SIZES = (4, 2, 3)


def begin(ranks: tuple[RankSpec, ...]) -> RunProgress:
    progress = RunProgress(RunSpec("run", "", "", Recipe(), ranks, None, None, ""))
    progress.regroup(ALL)
    return progress


@pytest.fixture
def progress() -> RunProgress:
    """Three ranks whose samples last for eight steps, at the start of the second epoch."""
    progress = begin(specs_of(SIZES, NUM_STEPS))
    run_steps(progress, NUM_STEPS)
    progress.end_epoch(CallbackState())
    progress.regroup(ALL)
    return progress


def run_steps(progress: RunProgress, count: int) -> list[float]:
    """Do steps whose loss is 2 for each sample. Return the epochs done in each."""
    done = []
    for _ in range(count):
        done.append(progress.epochs_done)
        num_samples = sum(progress.step_samples)
        progress.end_step(Sums(2.0 * num_samples, (1.0,), float(num_samples)), num_samples)
    return done


def run_to_the_epochs_end(progress: RunProgress) -> list[float]:
    return run_steps(progress, progress.segment.stop_step - progress.position.step)


def test_epochs_done_do_not_fall_back_when_batch_sizes_change_midway(progress: RunProgress) -> None:
    before = run_steps(progress, 5)
    progress.change_batch_sizes({0: 3, 1: 3, 2: 3})
    expected = [1 + (step + 0.5) / NUM_STEPS for step in range(NUM_STEPS)]
    assert before + run_to_the_epochs_end(progress) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("members", "unread"),
    [
        ({}, 0),
        ({2: (0, 1)}, 6 * 3),
        ({7: (0, 1)}, 1 * 3),
        ({2: (0, 1), 5: ALL}, 0),
        ({2: (0, 1), 4: (0, 2), 6: ALL}, 0),
        ({2: (0, 1), 4: (0, 2)}, 4 * 2),
    ],
)
def test_private_samples_that_no_rank_reads_are_counted_while_their_rank_is_lost(
    members: dict[int, tuple[int, ...]], unread: int
) -> None:
    """A rank that comes back reads what it had left."""
    public = specs_of(SIZES, NUM_STEPS)
    progress = begin(tuple(replace(rank, num_private=rank.num_public, num_public=0) for rank in public))
    read = 0
    while progress.position.step < progress.segment.stop_step:
        if progress.position.step in members:
            progress.regroup(members[progress.position.step])
        lost = progress.num_lost()
        read += sum(progress.share_of(share.rank).num_private for share in progress.segment.shares)
        run_steps(progress, 1)
    total = NUM_STEPS * sum(SIZES)
    assert lost == progress.num_lost() == total - read
    assert total - read == unread


def test_epoch_is_divided_the_same_whoever_left_and_came_back_before_its_first_step(
    progress: RunProgress,
) -> None:
    begun = progress.segment
    progress.regroup((0, 2))
    progress.plan_batch_sizes({0: 1, 2: 8})
    progress.regroup((0,))
    progress.plan_batch_sizes({0: 4, 2: 3})
    progress.regroup(ALL)
    assert progress.segment == begun


def test_epochs_done_reach_the_epochs_end_when_ranks_are_lost_midway(progress: RunProgress) -> None:
    """Twice: the steps of all earlier parts of the epoch count."""
    done = run_steps(progress, 3)
    progress.regroup((0, 1))
    done += run_steps(progress, 2)
    progress.regroup((0,))
    num_steps = progress.segment.stop_step
    done += run_to_the_epochs_end(progress)
    assert done[3] > 1 + 3 / num_steps
    assert done[-1] == pytest.approx(2 - 0.5 / num_steps)
    assert progress.position.step == num_steps


def test_results_of_an_epoch_are_of_all_its_steps_and_ranks_lost_ones_included(progress: RunProgress) -> None:
    run_steps(progress, 3)
    progress.regroup((0, 1))
    run_steps(progress, 1)
    progress.change_batch_sizes({0: 3, 1: 2})
    run_steps(progress, 1)
    num_samples = 3 * sum(SIZES) + 6 + 5
    assert progress.position.totals == EpochTotals(5, num_samples, 2 * num_samples, (5.0,), num_samples)


def test_rank_that_comes_back_has_its_latest_batch_size(progress: RunProgress) -> None:
    progress.change_batch_sizes({0: 5, 1: 1, 2: 3})
    run_steps(progress, 1)
    progress.regroup((0, 2))
    progress.change_batch_sizes({0: 4, 2: 4})
    run_to_the_epochs_end(progress)
    progress.end_epoch(CallbackState())
    progress.regroup(ALL)
    assert [share.batch_size for share in progress.segment.shares] == [4, 1, 4]


def test_planned_batch_sizes_are_used_when_the_ranks_regroup(progress: RunProgress) -> None:
    run_steps(progress, 2)
    progress.change_batch_sizes({0: 2, 1: 4, 2: 3})
    run_steps(progress, 1)
    progress.plan_batch_sizes({0: 4, 1: 2, 2: 3})
    assert [share.batch_size for share in progress.segment.shares] == [2, 4, 3]
    progress.regroup(ALL)
    assert [share.batch_size for share in progress.segment.shares] == [4, 2, 3]
    run_to_the_epochs_end(progress)
    assert progress.num_lost() == 0


def test_least_batch_sizes_let_private_samples_last_no_longer_than_the_epoch() -> None:
    host, csd0, csd1 = specs_of(SIZES, NUM_STEPS)
    progress = begin((host, replace(csd0, num_private=40, num_public=0), replace(csd1, num_private=0)))
    least = progress.least_batch_sizes()
    assert least[0] == least[2] == 0
    num_samples = sum(its.num_private + its.num_public for its in progress.samples)
    assert least[1] == -(-40 * sum(SIZES) // num_samples)
