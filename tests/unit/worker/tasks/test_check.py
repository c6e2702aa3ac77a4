"""The check of links with real ranks, hubs and links: who joins is summed over, and a loss ends nothing."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csdctl.worker.protocol.events import Finished, Joined, SumTimed
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import CHECK, RunSpec, TaskSpec
from tests.linked_ranks import LINK_KEY
from tests.unit.worker.tasks.joined_ranks import JoinedRanks
from tests.unit.worker.tasks.verified_models import specs_of

SUM_BYTES = (1 << 10, 1 << 21)
NUM_RANKS = 4


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[JoinedRanks]:
    """Rank 0 of a check of four ranks, which has begun alone."""
    arguments = {"sum_bytes": list(SUM_BYTES), "sum_ranks": [2], **getattr(request, "param", {})}
    specs = specs_of([1] * NUM_RANKS)
    run_id, task = f"check-{os.getpid()}-{time.monotonic_ns()}", TaskSpec(CHECK, arguments)
    spec = RunSpec(run_id, "", "", Recipe(), specs, None, None, "", task=task, link_key=LINK_KEY)
    with JoinedRanks(spec, tmp_path) as ranks:
        ranks.start(0)
        ranks.begin()
        yield ranks


def members(ranks: JoinedRanks) -> list[tuple[int, ...]]:
    """Who took part, as rank 0 has said each time."""
    return [tuple(map(int, event.batch_sizes)) for event in ranks.events(Joined)]


def timed(ranks: JoinedRanks) -> list[tuple[tuple[int, ...], int]]:
    return [(event.ranks, event.num_bytes) for event in ranks.events(SumTimed)]


def of_all_sizes(*members: int) -> list[tuple[tuple[int, ...], int]]:
    return [(members, size) for size in SUM_BYTES]


def test_sums_are_timed_over_the_wanted_numbers_of_ranks_and_at_the_end_over_all(ranks: JoinedRanks) -> None:
    """A rank that does not start keeps nobody waiting."""
    for rank in (2, 1, 3):
        ranks.start(rank)
        ranks.until(lambda rank=rank: rank in members(ranks)[-1])  # type: ignore[misc]
    assert members(ranks) == [(0,), (0, 2), (0, 1, 2), (0, 1, 2, 3)]
    assert [event.is_start for event in ranks.events(Joined)] == [True, False, False, False]
    assert timed(ranks) == of_all_sizes(0, 2)
    ranks.stop()
    assert ranks.until_exit(range(NUM_RANKS)) == [0] * NUM_RANKS
    assert timed(ranks) == [*of_all_sizes(0, 2), *of_all_sizes(0, 1, 2, 3)]
    assert len(ranks.events(Finished)) == NUM_RANKS
    assert all(event.sum_s > 0 for event in ranks.events(SumTimed))


def test_check_of_which_no_rank_is_reached_ends(ranks: JoinedRanks) -> None:
    ranks.until(lambda: members(ranks))
    ranks.stop()
    assert ranks.until_exit([0]) == [0]
    assert timed(ranks) == []


@pytest.mark.parametrize("ranks", [{}, {"sum_ranks": [], "sum_bytes": [1 << 21]}], indirect=True)
def test_rank_that_is_lost_in_the_sums_is_named_and_the_others_are_timed_without_it(
    ranks: JoinedRanks,
) -> None:
    for rank in (1, 2, 3):
        ranks.start(rank)
        ranks.until(lambda rank=rank: rank in members(ranks)[-1])  # type: ignore[misc]
    ranks.hold(2)
    ranks.stop()
    ranks.until(lambda: any(isinstance(what, dict) for what in ranks.of(2)))
    ranks.kill(2)
    assert ranks.until_exit([0, 1, 3]) == [0] * 3
    loss = ranks.events(Joined)[-1]
    assert members(ranks)[-1] == (0, 1, 3)
    assert [rank for rank, _ in loss.lost] == [2]
    assert {over for over, _ in timed(ranks) if len(over) > 2} == {(0, 1, 3)}


def test_rank_that_is_lost_between_sums_is_named(ranks: JoinedRanks) -> None:
    for rank in (1, 2):
        ranks.start(rank)
    ranks.until(lambda: members(ranks)[-1] == (0, 1, 2))
    ranks.kill(1)
    ranks.until(lambda: members(ranks)[-1] == (0, 2))
    assert [rank for rank, _ in ranks.events(Joined)[-1].lost] == [1]


@pytest.mark.parametrize("ranks", [{"is_wrong": True}], indirect=True)
def test_wrong_sum_is_an_error_on_every_rank(ranks: JoinedRanks) -> None:
    """Whoever has added a wrong number."""
    ranks.start(1)
    ranks.until_exit([0])
    errors: list[Any] = [what["error"] for what in ranks.of(0) if isinstance(what, dict)]
    (error,) = errors
    assert error.startswith("WorkerError: a sum over ranks is 4 in 256 of 256 elements, expected 3")
    assert timed(ranks) == []
