"""Ranks that are lost during training, hang or are slow: the others form a new group without lost ones."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csdctl.errors import DeadlineError, OutOfMemoryError
from csdctl.worker.protocol.events import Event, Finished, LinkLost, NodeLost, Paused, Progress
from csdctl.worker.protocol.orders import FormGroup, Order, Ping
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, Script, ScriptedRank, orders_of, shell


def hang(fleet: Fleet) -> None:
    fleet.rank(1).is_hung = True
    fleet.rank(0).lose_link(1)


def hang_while_others_wait(fleet: Fleet, reporter: int, *nodes: str) -> None:
    fleet.rank(1).is_hung = True
    fleet.rank(reporter).wait_for(*nodes)


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Fleet]:
    """Two servers: the host with csd3, and csd0 with csd1 and csd2."""
    fleet = Fleet(tmp_path, num_nodes=4)
    fleet.servers = (0, 1, 1, 1, 0)
    yield fleet
    fleet.assert_nothing_left()


def test_node_is_lost_without_its_server_whose_nodes_wait_for_it_and_join_with_it(rack: Fleet) -> None:
    def lose(rank: int) -> Script:
        return lambda fleet: fleet.rank(rank).exit()

    rack.reachable = {1}
    rack.scripts = {1: lose(3), 2: lose(1), 4: Fleet.finish}
    rack.run()
    assert rack.groups == rack.linked == [(0, 1, 2, 3, 4), (0, 1, 2, 4), (0, 4), (0, 1, 2, 4)]
    assert rack.nodes_of(NodeLost) == ["csd2", "csd0"]
    collectives = [order.collective for order in orders_of(rack.rank(0), FormGroup)]
    assert collectives == ["", "", "star", "star"], "nodes may reach their server alone"


@pytest.mark.parametrize(("culprit", "groups"), [(2, [(0, 1, 3, 4)]), (4, []), (1, []), (0, [])])
def test_server_is_believed_about_its_own_nodes_alone(
    rack: Fleet, culprit: int, groups: list[tuple[int, ...]]
) -> None:
    def accuse_and_finish(fleet: Fleet) -> None:
        fleet.rank(1).accuse(culprit)
        if not groups:
            Fleet.finish(fleet)

    rack.scripts = {1: accuse_and_finish, 2: Fleet.finish}
    rack.run()
    assert rack.groups == [(0, 1, 2, 3, 4), *groups]


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
        (lambda fleet: fleet.rank(0).accuse(1), "sent 20 bytes, expected 100"),
    ],
)
def test_others_continue_without_a_rank_that_is_lost(fleet: Fleet, script: Script, reason: str) -> None:
    fleet.scripts = {1: script, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == fleet.linked == [(0, 1, 2), (0, 2)]
    assert fleet.nodes_of(NodeLost) == ["csd0"]
    assert reason in fleet.lost_messages()[0]
    assert [group.generation for group in orders_of(fleet.rank(2), FormGroup)] == [1, 2]
    assert fleet.rank(1).is_closed


def test_group_of_the_same_ranks_keeps_its_collective(fleet: Fleet) -> None:
    fleet.scripts = {1: lambda fleet: fleet.rank(0).lose_link(1), 2: Fleet.finish}
    fleet.run()
    groups = [(order.ranks, order.collective) for order in orders_of(fleet.rank(0), FormGroup)]
    assert groups == [((0, 1, 2), ""), ((0, 1, 2), "star")]


def test_host_continues_alone_when_all_nodes_are_lost_at_once(fleet: Fleet) -> None:
    fleet.scripts = {1: lambda fleet: [fleet.rank(rank).exit() for rank in (1, 2)], 2: Fleet.finish}
    fleet.run()
    assert (fleet.groups, fleet.linked) == ([(0, 1, 2), (0,)], [(0, 1, 2)])
    assert fleet.nodes_of(NodeLost) == ["csd0", "csd1"]


@pytest.mark.parametrize("failing", [2, 0])
def test_node_that_fails_while_regrouping_is_left_out_and_rank_0_ends_the_run(
    fleet: Fleet, failing: int
) -> None:
    def fail_when_pinged(rank: ScriptedRank, order: Order) -> None:
        if rank.rank == failing and isinstance(order, Ping):
            rank.fail("disk full")

    fleet.on_order = fail_when_pinged
    fleet.scripts = {1: lambda fleet: fleet.rank(1).exit(), 2: Fleet.finish}
    if failing:
        fleet.run()
        assert fleet.groups == [(0, 1, 2), (0,)]
        assert "disk full" in fleet.lost_messages()[1]
    else:
        error = fleet.run_to_error()
        assert (error.node, error.message) == ("host", "disk full")


def test_run_with_fewer_nodes_left_than_min_nodes_fails_for_the_reason_that_the_node_reports(
    fleet: Fleet,
) -> None:
    fleet.min_nodes = 2
    fleet.scripts[1] = lambda fleet: fleet.rank(1).fail("disk full", remedy="make room")
    error = fleet.run_to_error()
    assert "nodes left: 1, but --min-nodes is 2" in error.message
    assert "csd0: disk full" in error.message
    assert "make room" in error.message
    assert "csd1" not in error.message
    assert len(fleet.lost_messages()) == 1
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


@pytest.mark.parametrize("is_late", [False, True])
def test_run_that_finishes_while_mpirun_fails_is_complete(fleet: Fleet, is_late: bool) -> None:
    """Also when rank 0 finishes later than the others, because it saves the model."""

    def save_the_model(event: Event) -> None:
        if fleet.nodes_of(Finished) == ["csd0", "csd1"]:
            fleet.on_event = lambda event: None
            fleet.rank(0).finish()
            fleet.rank(0).exit(is_clean=True)

    finish_when_pinged(fleet, *range(is_late, 3))
    if is_late:
        fleet.on_event = save_the_model
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]


def test_rank_that_can_no_longer_finish_with_the_others_fails_the_run(fleet: Fleet) -> None:
    finish_when_pinged(fleet, 0, 1)
    fleet.mpirun.clear()
    fleet.scripts[1] = lambda fleet: fleet.rank(2).lose_link(1)
    assert "no completion record from csd1" in fleet.run_to_error().message
    assert fleet.groups == [(0, 1, 2)]


def test_trial_in_which_a_rank_ran_out_of_memory_says_so_after_its_first_steps(fleet: Fleet) -> None:
    fleet.is_resumable, fleet.min_nodes = False, 2
    fleet.on_event = lambda event: (
        fleet.rank(2).exit(why=OutOfMemoryError) if isinstance(event, Progress) else None
    )
    fleet.scripts[1] = lambda fleet: fleet.rank(0).step()
    assert fleet.run_to_error(OutOfMemoryError).node == "csd1"


def test_slow_rank_that_answers_stays(fleet: Fleet) -> None:
    def wait(fleet: Fleet) -> None:
        fleet.rank(0).wait_for("csd1")
        fleet.rank(2).step()

    fleet.on_event = lambda event: fleet.finish() if isinstance(event, Progress) else None
    fleet.scripts[1] = wait
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]
    assert len(orders_of(fleet.rank(2), Ping)) == 1


@pytest.mark.parametrize("awaited", [(), ("csd0", "csd1")])
def test_run_without_steps_fails_at_the_silence_deadline_also_where_rank_0_waits_for_all_others(
    fleet: Fleet, awaited: tuple[str, ...]
) -> None:
    fleet.set_patience(silence_s=scaled(0.6))
    fleet.scripts[1] = lambda fleet: fleet.rank(0).wait_for(*awaited) if awaited else None
    error = fleet.run_to_error(DeadlineError)
    assert "no rank has completed a step for too long" in error.message
    assert "logs:" in error.remedy
    assert fleet.linked == [(0, 1, 2)] * 2, "a connection may hang: they are made once more"


def test_rank_that_answers_but_sends_the_others_nothing_is_left_out_at_the_deadline(fleet: Fleet) -> None:
    def send_nothing(fleet: Fleet) -> None:
        fleet.rank(0).wait_for("csd1")
        fleet.rank(2).step()  # says that it makes progress; rank 0 has seen nothing of it

    fleet.set_patience(silence_s=scaled(0.6))
    fleet.scripts = {1: send_nothing, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 1)]
    assert "has sent the other ranks nothing" in fleet.lost_messages()[0]


@pytest.mark.parametrize("stop", [ScriptedRank.finish, ScriptedRank.pause])
def test_rank_that_hangs_after_others_have_finished_or_paused_is_lost(
    fleet: Fleet, stop: Callable[[ScriptedRank], None]
) -> None:
    def hang_at_the_end(fleet: Fleet) -> None:
        fleet.rank(1).is_hung = True
        stop(fleet.rank(0))
        stop(fleet.rank(2))

    fleet.scripts[1] = hang_at_the_end
    fleet.scripts[2] = Fleet.finish
    if stop is ScriptedRank.finish:
        assert fleet.run_to_error().node == "csd0"
    else:
        fleet.run()
        assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert "is stopped, or its machine hangs" in fleet.lost_messages()[0]
