"""Ranks that are lost and come back while others train: real ranks, hubs and links.

Every sample of an epoch is read once, or it is counted as lost.
"""

import dataclasses
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.protocol.events import EpochEnd, Finished, Joined
from csdctl.worker.protocol.recipe import LossTerm, Recipe
from csdctl.worker.protocol.run_spec import DatasetSlice, RankSpec, RunSpec, Runtime
from tests.linked_ranks import LINK_KEY
from tests.unit.worker.compute.built_models import carry, keras
from tests.unit.worker.tasks.joined_ranks import FOREVER, JoinedRanks

NODES = ("host", "csd0", "csd1")
SIZES = (4, 2, 3)
NUM_PUBLIC, NUM_PRIVATE, NUM_STEPS = (24, 8, 6), (0, 8, 18), 8
FIRST_PRIVATE = (0, 1000, 2000)
"""The numbers of the ranks' private samples begin here. Public ones begin at 0."""
ALL = [
    *range(sum(NUM_PUBLIC)),
    *(first + n for first, count in zip(FIRST_PRIVATE, NUM_PRIVATE, strict=True) for n in range(count)),
]
OF_CSD1 = set(range(2000, 2000 + NUM_PRIVATE[2]))


def write(directory: Path, first: int, count: int) -> DatasetSlice:
    """Write samples that have their numbers as values."""
    directory.mkdir()
    paths = directory / "images.npy", directory / "labels.npy"
    np.save(paths[0], np.arange(first, first + count, dtype=np.float32).reshape(-1, 1))
    np.save(paths[1], np.zeros((count, 1), np.float32))
    images, labels = (hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    return DatasetSlice(*map(str, paths), images_sha256=images, labels_sha256=labels)


def make_spec(directory: Path) -> RunSpec:
    recipe = Recipe(
        losses={"": LossTerm("mean_squared_error")}, learning_rate=1e-9, epochs=2, optimizer="sgd", seed=7
    )
    keras().utils.set_random_seed(1)
    model = keras().Sequential([keras().Input((1,)), keras().layers.Dense(1)])
    architecture, weights = carry(model, directory, recipe)
    public, ranks, start = write(directory / "public", 0, sum(NUM_PUBLIC)), [], 0
    for rank, node in enumerate(NODES):
        num_private, num_public = NUM_PRIVATE[rank], NUM_PUBLIC[rank]
        rank_public = dataclasses.replace(
            public, start=start, stop=start + num_public, permutation_seed=recipe.seed
        )
        private = write(directory / node, FIRST_PRIVATE[rank], num_private)
        counts = num_private, num_public, start
        ranks.append(
            RankSpec(
                rank, node, SIZES[rank], Runtime(1), private if num_private else None, rank_public, *counts
            )
        )
        start += num_public
    return RunSpec(
        f"joining-{os.getpid()}-{time.monotonic_ns()}",
        *(architecture, weights, recipe, tuple(ranks), public, None, ""),
        is_balanced=False,
        num_checkpoints=0,
        link_key=LINK_KEY,
    )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[JoinedRanks]:
    with JoinedRanks(make_spec(tmp_path), tmp_path) as ranks:
        for rank in range(len(NODES)):
            ranks.start(rank)
        ranks.begin(1, 2)
        ranks.until(lambda: ranks.events(Joined))
        yield ranks


def reads(ranks: JoinedRanks, epoch: int) -> dict[tuple[int, int], list[int]]:
    """What each rank has read in each step of an epoch, in order of the steps."""
    read_in: dict[tuple[int, int], list[int]] = {}
    for rank, what in list(ranks.said):
        if isinstance(what, dict) and what.get("epoch") == epoch:
            assert (rank, what["step"]) not in read_in, "a step that was counted is taken again"
            read_in[rank, what["step"]] = what["read"]
    return read_in


def count(read_in: dict[tuple[int, int], list[int]], without: tuple[int, int]) -> Counter[int]:
    """Return how often each sample was read, but `without` those of one rank and step."""
    return Counter(number for at, numbers in read_in.items() if at != without for number in numbers)


def num_said(ranks: JoinedRanks, rank: int, what: str) -> int:
    return len([line for line in ranks.of(rank) if isinstance(line, dict) and what in line])


def lose_in_step(ranks: JoinedRanks, epoch: int, step: int, total_steps: int) -> list[int]:
    """Kill rank 2 in a step, before it has computed. Return the samples that it has read for it."""
    num_joined, num_held = len(ranks.events(Joined)), num_said(ranks, 2, "held")
    ranks.hold(2, epoch, step)
    ranks.allow(total_steps + 1)
    ranks.until(lambda: num_said(ranks, 2, "held") > num_held)
    ranks.kill(2)
    ranks.until(lambda: len(ranks.events(Joined)) > num_joined)
    assert set(ranks.events(Joined)[-1].batch_sizes) == {"0", "1"}
    return reads(ranks, epoch)[2, step]


def take_steps_until_the_end(ranks: JoinedRanks) -> int:
    """Let the ranks take the steps of the first epoch. Return how many they are."""

    def num_begun() -> int:
        return num_said(ranks, 0, "read")

    def has_ended() -> bool:
        return any(event.rank == 0 for event in ranks.events(EpochEnd))

    while not has_ended():
        number = num_begun() + 1
        ranks.allow(number)
        ranks.until(lambda number=number: num_begun() == number or has_ended())  # type: ignore[misc]
    return num_begun()


def is_joining(ranks: JoinedRanks) -> Any:
    return any(isinstance(what, dict) and what.get("joining") == [2] for what in ranks.of(0))


def test_samples_of_a_rank_that_is_lost_and_comes_back_are_each_counted_once(ranks: JoinedRanks) -> None:
    """In the second epoch it does not come back."""
    in_vain = lose_in_step(ranks, 1, 3, 3)
    (loss,) = ranks.events(Joined)[1:]
    assert [rank for rank, _ in loss.lost] == [2]
    assert (loss.step, loss.epoch_samples) == (4, 4 * sum(SIZES) - SIZES[2])
    ranks.start(2)
    ranks.until(lambda: is_joining(ranks))
    total_steps = take_steps_until_the_end(ranks)
    second_in_vain = lose_in_step(ranks, 2, 2, total_steps + 2)
    joined = ranks.events(Joined)
    back = next(event for event in joined if event.step > loss.step and "2" in event.batch_sizes)
    assert back.step == 5, "in the step after the one in which it was let in"
    assert back.num_lost == 0
    first = reads(ranks, 1)
    assert min(step for rank, step in first if rank == 2 and step > 3) == 5
    counted = count(first, without=(2, 3))
    assert counted == Counter(ALL)
    assert OF_CSD1 & set(in_vain), "private samples are read again"
    end = next(event for event in ranks.events(EpochEnd) if event.rank == 0)
    assert (end.global_samples, end.num_lost) == (len(ALL), 0)

    ranks.allow(FOREVER)
    ranks.until(lambda: len(ranks.events(Finished)) == 2)
    counted = count(reads(ranks, 2), without=(2, 2))
    missing = Counter(ALL) - counted
    assert counted == Counter(ALL) - missing
    assert set(missing) <= OF_CSD1
    assert set(second_in_vain) & OF_CSD1 <= set(missing)
    end = next(event for event in ranks.events(EpochEnd) if event.rank == 0 and event.epoch == 2)
    assert (end.global_samples, end.num_lost) == (len(ALL) - len(missing), len(missing))
    hashes = {event.weights_hash for event in ranks.events(Finished)}
    assert len(hashes) == 1
    by_epoch = {event.weights_hash for event in ranks.events(EpochEnd) if event.epoch == 1}
    assert len([event for event in ranks.events(EpochEnd) if event.epoch == 1]) == 3
    assert len(by_epoch) == 1, "the rank that came back has the same weights"
