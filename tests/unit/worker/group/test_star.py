"""Rank 0 of a star: what it has sent stays as it was until it has arrived, however late that is.

MPI is scripted: messages arrive when a test says so, and take their content from the sender's memory then.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from csdctl.worker.group import collective
from csdctl.worker.group.chunks import CHUNK_SIZE
from csdctl.worker.group.collective import Star, choose_collective
from csdctl.worker.group.values import ExpectedTails

NUM_ELEMENTS = CHUNK_SIZE + 3
"""Two chunks."""
SIZE = 3
Array = np.ndarray[Any, Any]


@dataclass
class Sending:
    """A message of rank 0 on its way, which takes its content from rank 0's memory when it arrives."""

    content: Array
    rank: int
    num_tests: int
    """How often it is tested before it arrives."""
    arrived: Array | None = None

    def Test(self) -> bool:
        self.num_tests -= 1
        if self.arrived is None and self.num_tests <= 0:
            self.arrived = self.content.copy()
        return self.arrived is not None


@dataclass
class Receiving:
    """A message to rank 0, which arrives when the test has put it into the memory."""

    into: Array
    rank: int
    has_arrived: bool = False

    def Test(self) -> bool:
        return self.has_arrived


@dataclass
class SlowWorld:
    """In place of `World`, on rank 0."""

    num_tests: int = 5
    rank: int = 0
    size: int = SIZE
    sent: list[Sending] = field(default_factory=list)
    awaited: list[Receiving] = field(default_factory=list)

    def start_send(self, content: Array, rank: int, tag: int) -> Sending:
        self.sent.append(Sending(content, rank, self.num_tests))
        return self.sent[-1]

    def start_receive(self, into: Array, rank: int, tag: int) -> Receiving:
        self.awaited.append(Receiving(into, rank))
        return self.awaited[-1]

    def let_arrive(self, *values: float) -> None:
        """Let the vectors of ranks 1… arrive, whose elements all have these values."""
        for message in self.awaited:
            message.into[:] = values[message.rank - 1]
            message.has_arrived = True
        self.awaited.clear()

    def received(self, rank: int) -> list[list[float]]:
        """Return the different elements of each message that has arrived at a rank, in order."""
        return [
            np.unique(one.arrived).tolist()
            for one in self.sent
            if one.rank == rank and one.arrived is not None
        ]


def make_star(world: Any, *sizes: int) -> tuple[Star, Array, Array]:
    """Return the star of rank 0, its vector and the sum."""
    local, total = np.zeros(NUM_ELEMENTS, np.float32), np.zeros(NUM_ELEMENTS, np.float32)
    return Star(world, local, total, [(size, 0) for size in sizes]), local, total


def add(star: Star, world: SlowWorld, local: Array, *values: float) -> None:
    """Sum vectors whose elements all have these values: rank 0's first."""
    local[:] = values[0]
    star.post_receives()
    world.let_arrive(*values[1:])
    star.sum()


def test_sum_that_is_still_on_its_way_is_not_overwritten_by_the_next_one() -> None:
    world = SlowWorld(num_tests=3)
    star, local, total = make_star(world)
    add(star, world, local, 1.0, 20.0, 300.0)
    for _ in range(2):
        star.progress()
        assert star.is_sending
        assert world.received(1) == []
    add(star, world, local, 2.0, 40.0, 600.0)
    star.flush()
    assert not star.is_sending
    assert world.received(1) == world.received(2) == [[321.0], [321.0], [642.0], [642.0]]
    assert np.unique(total).tolist() == [642.0]


def test_vectors_that_arrive_early_do_not_change_the_sum_that_is_on_its_way() -> None:
    world = SlowWorld()
    star, local, total = make_star(world)
    add(star, world, local, 1.0, 20.0, 300.0)
    star.post_receives()
    world.let_arrive(40.0, 600.0)
    star.progress()
    assert np.unique(total).tolist() == [321.0]
    local[:] = 2.0  # computed while they were added
    star.sum()
    star.flush()
    assert world.received(2) == [[321.0], [321.0], [642.0], [642.0]]


def test_vectors_are_added_in_the_order_of_ranks_and_rank_0_last() -> None:
    """The sum has the same bits in every run, whatever arrives first."""
    world = SlowWorld()
    star, local, total = make_star(world)
    add(star, world, local, 1.0, 1e8, -1e8)
    assert np.unique(total).tolist() == [1.0]


def test_what_is_left_of_a_larger_sum_is_no_part_of_a_smaller_one() -> None:
    world = SlowWorld(num_tests=1)
    star, local, total = make_star(world, NUM_ELEMENTS, 7)
    add(star, world, local, 1.0, np.inf, 300.0)  # an optimizer with loss scaling skips it
    assert star.find_not_finite() == [1]
    star.post_receives()
    assert [len(message.into) for message in world.awaited] == [7, 7]
    expected = ExpectedTails(2, (0, 1, 2), (1.0, 20.0, 300.0))
    for message, count in zip(world.awaited, (20.0, 300.0), strict=True):
        message.into[:] = [5.0, 5.0, count, 0.0, 0.0, 0.0, 0.0]
        message.has_arrived = True
    world.awaited.clear()
    local[:7] = [5.0, 5.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    star.sum(expected=expected)
    assert total[:7].tolist() == [15.0, 15.0, 321.0, 0.0, 0.0, 0.0, 0.0]
    star.post_receives()  # of the larger one again
    assert star.find_not_finite() == []


def choose_among(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, list[float]], wanted: str = "") -> Any:
    """Choose among collectives, in whose place are the seconds that their sums take on the ranks."""
    kinds = {name: lambda *_, times=times: times for name, times in seconds.items()}
    monkeypatch.setattr(collective, "COLLECTIVES", kinds)
    monkeypatch.setattr(collective, "gather_values", lambda *_: [])
    monkeypatch.setattr(collective, "_time_sum", lambda world, times, on_wait: times)
    monkeypatch.setattr(collective, "find_slowest_s", lambda world, times, on_wait: max(times))
    nothing: Any = None
    return choose_collective(nothing, [0.0], [0.0], wanted)


def test_collective_is_the_one_whose_slowest_rank_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"one": [0.1, 0.5], "two": [0.4, 0.3], "three": [0.2, 9.0]}
    assert choose_among(monkeypatch, seconds) == (seconds["two"], "two", 0.4)
    assert choose_among(monkeypatch, seconds, "three") == (seconds["three"], "three", 9.0)
