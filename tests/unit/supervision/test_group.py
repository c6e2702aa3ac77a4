"""The state of a group that follows from its members' events."""

import pytest

from csdctl.supervision.membership import GroupState
from csdctl.worker.protocol.events import LinkLost, Pong, Progress, WaitingFor


@pytest.fixture
def group() -> GroupState:
    return GroupState(generation=2, ranks=(0, 1, 2), last_progress=100.0)


def test_progress_of_rank_0_counts_and_that_of_nodes_does_not(group: GroupState) -> None:
    group.awaited = {1}
    group.record_arrival(WaitingFor(0, "host", ("csd0",)), now=110.0)
    group.record_arrival(Progress(1, "csd0", 1, 1, 1, 8, 0.1, 0.1, 0.2), now=111.0)
    assert (group.last_progress, group.awaited) == (100.0, {1})
    group.record_arrival(Progress(0, "host", 1, 1, 1, 8, 0.1, 0.1, 0.2), now=112.0)
    assert (group.last_progress, group.awaited) == (112.0, set())


def test_only_an_answer_after_the_ping_drops_the_ping(group: GroupState) -> None:
    group.record_arrival(Pong(1, "csd0", 2), now=101.0)
    group.pinged = {1: 102.0, 2: 102.0}
    group.record_arrival(Pong(2, "csd1", 2), now=103.0)
    group.drop_answered_pings()
    assert group.pinged == {1: 102.0}


def test_lost_link_of_an_earlier_generation_does_not_count(group: GroupState) -> None:
    group.record_arrival(LinkLost(1, "csd0", 1, 1, 3), now=101.0)
    group.record_arrival(LinkLost(2, "csd1", 2, 1, 3), now=101.0)
    assert (group.unlinked, group.first_unlinked) == ({2}, 2)
