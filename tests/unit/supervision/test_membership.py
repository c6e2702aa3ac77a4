"""Which ranks are lost, which are back, and how often a rank may be restarted."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.errors import NodeError, OutOfMemoryError
from csdctl.supervision.run_setup import Patience
from csdctl.supervision.supervisor import GroupState, Membership, as_run_error
from csdctl.worker.protocol.events import EpochEnd, Event, NodeBack, Progress, Ready

NODES = ("host", "csd0", "csd1")
MAX_RESTARTS = 3


class Processes:
    """The processes of all ranks: which there are, and which were dropped and restarted."""

    def __init__(self) -> None:
        self.ranks = set(range(len(NODES)))
        self.restarted: list[int] = []

    def drop(self, rank: int) -> None:
        self.ranks.discard(rank)

    def restart(self, rank: int) -> None:
        self.restarted.append(rank)


class Fleet:
    """A run that trains, with `membership` as the supervisor has it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.processes: Any = Processes()
        patience = Patience(max_restarts=MAX_RESTARTS)
        setup: Any = SimpleNamespace(nodes=NODES, servers=(), patience=patience)
        self.membership = Membership(setup, self.processes, self.events.append)
        self.membership.ready = set(range(len(NODES)))
        self.membership.has_trained = True

    def lose(self, rank: int, reason: str = "killed") -> None:
        self.membership.mark_lost(rank, NodeError(reason, node=NODES[rank]))

    def bring_back(self, rank: int) -> None:
        """Let the restarted rank report that it is ready, as `Supervisor` hears of it."""
        self.processes.ranks.add(rank)
        self.membership.restarting.add(rank)
        self.membership.ready.add(rank)
        self.membership.readmit(Ready(rank, NODES[rank], 100))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def ended(epoch: int) -> EpochEnd:
    return EpochEnd(0, "host", epoch, 10, 100, 1.0, 1.0, 2.0, "hash")


def step(epoch: int, number: int) -> Progress:
    return Progress(0, "host", epoch, number, 1, 8, 0.1, 0.1, 0.2)


def test_rank_that_is_back_is_no_longer_lost(fleet: Fleet) -> None:
    """What is said of lost nodes, and why a group was lost, is of ranks that are lost now."""
    fleet.lose(1, "first")
    fleet.lose(2, "second")
    fleet.bring_back(2)
    assert [error.message for error in fleet.membership.losses] == ["first"]
    assert fleet.membership.latest_loss([2]) is None
    assert fleet.membership.restarting == set()
    assert fleet.membership.present() == {0, 2}
    assert fleet.events[-1] == NodeBack(2, "csd1")
    fleet.bring_back(1)
    assert fleet.membership.losses == []
    assert fleet.membership.latest_loss([0, 1, 2]) is None


@pytest.mark.parametrize(
    ("report", "is_exhausted"),
    [
        (step(2, 4), True),
        (step(2, 5), True),
        (step(2, 6), False),
        (step(1, 9), True),
        (step(3, 1), False),
        (ended(2), False),
    ],
)
def test_rank_0_renews_its_restarts_with_a_step_after_the_one_at_which_it_was_lost(
    fleet: Fleet, report: Progress | EpochEnd, *, is_exhausted: bool
) -> None:
    fleet.membership.record_progress(step(2, 5), [0, 1, 2])
    for _ in range(MAX_RESTARTS):
        fleet.lose(0)
        fleet.bring_back(0)
    fleet.membership.record_progress(report, [0, 1, 2])
    fleet.lose(0)
    assert fleet.membership.is_exhausted(0) is is_exhausted


def test_only_what_rank_0_reports_shows_that_the_run_does_not_hang() -> None:
    group = GroupState(1, (0, 1), last_progress=10.0)
    group.record_arrival(replace(step(1, 1), rank=1, node="csd0"), 20.0)
    assert group.last_progress == 10.0
    group.record_arrival(step(1, 1), 30.0)
    assert group.last_progress == 30.0


def test_lack_of_memory_that_ends_the_run_is_still_that() -> None:
    error = OutOfMemoryError("killed", node="csd1")
    assert as_run_error(error) is error


def test_node_that_its_server_waits_for_is_left_out_in_place_of_the_server() -> None:
    group = GroupState(1, (0, 1, 2, 3, 4), last_progress=0.0)
    group.awaited, group.awaited_by_server = {1}, {1: {3}, 4: set()}
    assert group.find_awaited() == {3}
    group.awaited = {1, 4}
    assert group.find_awaited() == {3, 4}
