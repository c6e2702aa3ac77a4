"""Ranks that are lost during training: the others form a new group without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.supervision.membership import GroupState
from csdctl.worker.protocol.events import Event, Finished, LinkLost, Misbehaved, NodeLost, Paused
from csdctl.worker.protocol.orders import FormGroup, Order, Ping
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, Script, ScriptedRank, orders_of, shell


def hang(fleet: Fleet) -> None:
    fleet.rank(1).is_hung = True
    fleet.rank(0).lose_link(1)


def hang_while_others_wait(fleet: Fleet, reporter: int, *nodes: str) -> None:
    fleet.rank(1).is_hung = True
    fleet.rank(reporter).wait_for(*nodes)


def accuse(fleet: Fleet) -> None:
    fleet.rank(0).report(Misbehaved(0, "host", 1, "sent 20 bytes, expected 100"))


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Fleet]:
    """Two servers: the host with csd3, and csd0 with csd1 and csd2."""
    fleet = Fleet(tmp_path, num_nodes=4)
    fleet.servers = (0, 1, 1, 1, 0)
    yield fleet
    fleet.assert_nothing_left()


def test_nodes_wait_for_the_rank_of_their_server_and_join_with_it(rack: Fleet) -> None:
    rack.reachable = {1}
    rack.scripts = {1: lambda fleet: fleet.rank(1).exit(), 3: Fleet.finish}
    rack.run()
    assert rack.groups == rack.linked == [(0, 1, 2, 3, 4), (0, 4), (0, 1, 2, 3, 4)]
    assert rack.nodes_of(NodeLost) == ["csd0"]


def test_node_is_lost_without_its_server(rack: Fleet) -> None:
    rack.scripts = {1: lambda fleet: fleet.rank(3).exit(), 2: Fleet.finish}
    rack.run()
    assert rack.groups == [(0, 1, 2, 3, 4), (0, 1, 2, 4)]


@pytest.mark.parametrize(("culprit", "groups"), [(2, [(0, 1, 3, 4)]), (4, []), (1, []), (0, [])])
def test_server_is_believed_about_its_own_nodes_alone(
    rack: Fleet, culprit: int, groups: list[tuple[int, ...]]
) -> None:
    def accuse_and_finish(fleet: Fleet) -> None:
        fleet.rank(1).report(Misbehaved(1, "csd0", culprit, "sent 20 bytes, expected 100"))
        if not groups:
            Fleet.finish(fleet)

    rack.scripts = {1: accuse_and_finish, 2: Fleet.finish}
    rack.run()
    assert rack.groups == [(0, 1, 2, 3, 4), *groups]


def test_node_that_its_server_waits_for_is_left_out_in_place_of_the_server() -> None:
    group = GroupState(1, (0, 1, 2, 3, 4), last_progress=0.0)
    group.awaited, group.awaited_by_server = {1}, {1: {3}, 4: set()}
    assert group.find_awaited() == {3}
    group.awaited = {1, 4}
    assert group.find_awaited() == {3, 4}


HANGS = "is stopped, or its machine hangs"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (lambda fleet: fleet.rank(1).exit(), "rank 1 was killed by signal 15"),
        (hang, "no longer answers"),
        (lambda fleet: hang_while_others_wait(fleet, 0, "csd0", "csd1"), HANGS),
        (lambda fleet: hang_while_others_wait(fleet, 0), HANGS),
        (lambda fleet: hang_while_others_wait(fleet, 2), HANGS),
        (lambda fleet: fleet.rank(1).pause(), "left the group without an order"),
        (accuse, "csd0: sent 20 bytes, expected 100"),
    ],
)
def test_others_continue_without_a_rank_that_is_lost(fleet: Fleet, script: Script, reason: str) -> None:
    fleet.scripts = {1: script, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == fleet.linked == [(0, 1, 2), (0, 2)]
    assert fleet.nodes_of(NodeLost) == ["csd0"]
    assert reason in fleet.lost_messages()[0]
    assert [group.generation for group in orders_of(fleet.rank(2), FormGroup)] == [1, 2]  # type: ignore[attr-defined]
    assert next(process for process in fleet.processes if process.rank == 1).is_closed


def test_group_of_the_same_ranks_keeps_its_collective(fleet: Fleet) -> None:
    fleet.scripts = {1: lambda fleet: fleet.rank(0).lose_link(1), 2: Fleet.finish}
    fleet.run()
    first, second = orders_of(fleet.rank(0), FormGroup)
    assert isinstance(first, FormGroup)
    assert isinstance(second, FormGroup)
    assert (first.collective, second.collective) == ("", "star")
    assert first.ranks == second.ranks == (0, 1, 2)


def test_host_continues_alone_when_all_nodes_are_lost_at_once(fleet: Fleet) -> None:
    def lose_all_nodes(fleet: Fleet) -> None:
        fleet.rank(1).exit()
        fleet.rank(2).exit()

    fleet.scripts = {1: lose_all_nodes, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]
    assert fleet.linked == [(0, 1, 2)]
    assert fleet.nodes_of(NodeLost) == ["csd0", "csd1"]


def test_rank_that_fails_while_regrouping_is_left_out_with_its_message(fleet: Fleet) -> None:
    def fail_when_pinged(rank: ScriptedRank, order: Order) -> None:
        if rank.rank == 2 and isinstance(order, Ping):
            rank.fail("disk full")

    fleet.on_order = fail_when_pinged
    fleet.scripts = {1: lambda fleet: fleet.rank(1).exit(), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]
    assert "disk full" in fleet.lost_messages()[1]


def test_failure_of_rank_0_while_regrouping_fails_the_run(fleet: Fleet) -> None:
    def fail_when_pinged(rank: ScriptedRank, order: Order) -> None:
        if rank.rank == 0 and isinstance(order, Ping):
            rank.fail("disk full")

    fleet.on_order = fail_when_pinged
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    error = fleet.run_to_error()
    assert (error.node, error.message) == ("host", "disk full")


def test_run_with_fewer_nodes_left_than_min_nodes_fails(fleet: Fleet) -> None:
    fleet.min_nodes = 2
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    error = fleet.run_to_error()
    assert "nodes left: 1, but --min-nodes is 2" in error.message
    assert "csd0: rank 1 was killed by signal 15" in error.message
    assert "csd1" not in error.message
    assert "csdctl train --resume 20261122-100000" in error.remedy


def test_messages_of_an_earlier_group_are_ignored(fleet: Fleet) -> None:
    def report_late(fleet: Fleet) -> None:
        fleet.rank(0).lose_link(1)
        fleet.rank(2).lose_link(1)
        fleet.rank(2).report(Paused(2, "csd1", 1))
        fleet.rank(0).report(Paused(0, "host", 1))
        fleet.finish()

    fleet.scripts = {1: lambda fleet: fleet.rank(1).exit(), 2: report_late}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert len(fleet.nodes_of(LinkLost)) == 2


def test_late_joined_event_of_an_earlier_group_does_not_complete_the_new_group(fleet: Fleet) -> None:
    fleet.set_patience(join_s=scaled(0.5), join_per_rank_s=0.0)

    def join_late(fleet: Fleet) -> None:
        fleet.rank(2).join(FormGroup(1, (0, 1, 2)))

    def lose_one(fleet: Fleet) -> None:
        fleet.never_join = {2}
        fleet.rank(1).exit()

    fleet.scripts = {1: lose_one, 2: join_late, 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 2)]


def test_node_lost_after_others_finished_leaves_the_run_incomplete(fleet: Fleet) -> None:
    def lose_one_at_the_end(fleet: Fleet) -> None:
        for rank in (0, 1):
            fleet.rank(rank).finish()
            fleet.rank(rank).exit(is_clean=True)
        fleet.rank(2).exit()

    fleet.scripts[1] = lose_one_at_the_end
    error = fleet.run_to_error()
    assert error.node == "csd1"
    assert "killed by signal 15" in error.message
    assert "no completion record from csd1" in error.message


def finish_when_pinged(fleet: Fleet, *ranks: int) -> None:
    """Let mpirun fail when `ranks` no longer need it: they finish when they are pinged."""

    def finish(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Ping) and rank.rank in ranks:
            rank.finish()
            rank.exit(is_clean=True)

    fleet.on_order = finish
    fleet.mpirun[1] = shell("exit 1")


def test_run_that_finishes_while_mpirun_fails_is_complete(fleet: Fleet) -> None:
    finish_when_pinged(fleet, 0, 1, 2)
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]


def test_rank_that_finishes_later_than_others_is_awaited_after_mpirun_failed(fleet: Fleet) -> None:
    def save_the_model(event: Event) -> None:
        if fleet.nodes_of(Finished) == ["csd0", "csd1"]:
            fleet.on_event = lambda event: None
            fleet.rank(0).finish()
            fleet.rank(0).exit(is_clean=True)

    finish_when_pinged(fleet, 1, 2)
    fleet.on_event = save_the_model
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]


def test_rank_that_can_no_longer_finish_with_the_others_fails_the_run(fleet: Fleet) -> None:
    finish_when_pinged(fleet, 0, 1)
    fleet.mpirun.clear()
    fleet.scripts[1] = lambda fleet: fleet.rank(2).lose_link(1)
    assert "no completion record from csd1" in fleet.run_to_error().message
    assert fleet.groups == [(0, 1, 2)]
