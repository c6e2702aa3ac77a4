"""Lost ranks and links that are restarted and take part again."""

import pytest

from csdctl.errors import UnreachableError
from csdctl.worker.protocol.events import EpochEnd, Event, NodeBack, NodeLost, Progress
from csdctl.worker.protocol.orders import Begin
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedLink, ScriptedRank, orders_of


@pytest.mark.parametrize("num_failed", [0, 1])
def test_node_that_returns_takes_part_again(fleet: Fleet, num_failed: int) -> None:
    """Also when a restarted process has exited before it was ready: another one is started."""

    def start(rank: ScriptedRank) -> None:
        if 3 < len(fleet.processes) <= 3 + num_failed:
            rank.exit("no memory")
        else:
            rank.report_ready()

    fleet.on_start = start
    fleet.reachable = {1}
    fleet.scripts = {1: lambda fleet: fleet.rank(1).exit(), 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert fleet.nodes_of(NodeBack) == ["csd0"]
    assert [link.rank for link in fleet.links] == [1, 2, 1]


def test_link_that_is_lost_comes_back_to_the_same_process(fleet: Fleet) -> None:
    fleet.scripts = {1: lambda fleet: fleet.break_link(1), 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert (fleet.nodes_of(NodeLost), fleet.nodes_of(NodeBack)) == (["csd0"], ["csd0"])
    assert len(fleet.processes) == 3


def test_restarted_rank_0_begins_alone_and_the_others_join_it(fleet: Fleet) -> None:
    def lose(fleet: Fleet) -> None:
        for rank in (1, 2):  # their ends beside the hub end with it
            fleet.link(rank).has_ended = True
        fleet.rank(0).exit()

    fleet.reachable = {0}
    fleet.scripts = {1: lose}
    fleet.on_event = lambda event: (
        fleet.finish() if isinstance(event, NodeBack) and len(fleet.members) == 3 else None
    )
    fleet.run()
    assert fleet.groups[-1] == (0, 1, 2)
    assert orders_of(fleet.rank(0), Begin) == [Begin((0,))]
    assert [process.rank for process in fleet.processes] == [0, 1, 2, 0]


def test_run_fails_when_rank_0_cannot_be_restarted(fleet: Fleet) -> None:
    fleet.set_patience(silence_s=scaled(1.0))
    fleet.scripts[1] = lambda fleet: fleet.rank(0).exit()
    error = fleet.run_to_error()
    assert (error.node, error.message) == ("host", "rank 0 was killed by signal 15")


def test_rank_0_lost_more_often_fails_the_run_at_once(fleet: Fleet) -> None:
    fleet.reachable = {0}
    fleet.scripts = dict.fromkeys(range(1, 99), lambda fleet: fleet.rank(0).exit())
    assert fleet.run_to_error().node == "host"
    assert len(fleet.nodes_of(NodeLost)) == fleet.patience.max_restarts + 1


@pytest.mark.parametrize("progress", ["nothing", "epoch", "long"])
@pytest.mark.parametrize("loses_process", [False, True])
def test_node_is_restarted_again_after_progress_with_it(
    fleet: Fleet, progress: str, loses_process: bool
) -> None:
    """The end of an epoch, or a step of rank 0 after the node has taken part for long enough."""
    max_restarts = fleet.patience.max_restarts
    fleet.set_patience(renew_s=0.0 if progress == "long" else 3600.0)
    fleet.reachable = {1}
    num_losses = 2 * max_restarts

    def act(event: Event) -> None:
        limit = max_restarts if progress == "nothing" else num_losses
        if isinstance(event, NodeLost) and len(fleet.nodes_of(NodeLost)) > limit:
            fleet.finish()
        elif isinstance(event, Progress | EpochEnd) and 1 in fleet.members:
            fleet.rank(1).exit() if loses_process else fleet.break_link(1)

    def go_on(fleet: Fleet) -> None:
        if 1 in fleet.members:
            fleet.rank(0).end_epoch() if progress == "epoch" else fleet.rank(0).step()

    fleet.on_event = act
    fleet.scripts = dict.fromkeys(range(1, 4 * num_losses), go_on)
    fleet.run()
    expected = max_restarts + 1 if progress == "nothing" else num_losses + 1
    assert fleet.nodes_of(NodeLost) == ["csd0"] * expected


def test_node_that_fails_after_its_restart_stays_lost(fleet: Fleet) -> None:
    def start(rank: ScriptedRank) -> None:
        if len(fleet.processes) == 4:
            fleet.reachable = set()
            rank.fail("the shard is gone")
            fleet.finish()
        else:
            rank.report_ready()

    fleet.on_start = start
    fleet.reachable = {1}
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert fleet.nodes_of(NodeLost) == ["csd0"]


@pytest.mark.parametrize("is_soon", [True, False], ids=["before the others", "when they train"])
def test_rank_whose_node_could_not_be_reached_joins_a_run_that_began_without_it(
    fleet: Fleet, *, is_soon: bool
) -> None:
    """Whatever fails there until then ends nothing."""
    fleet.late = {1: UnreachableError("does not answer", node="csd0")}
    fleet.reachable = {1} if is_soon else set()
    fleet.never_connect = {1}

    def let_it_connect(fleet: Fleet) -> None:
        fleet.reachable, fleet.never_connect = {1}, set()
        for link in fleet.links:
            link.has_ended |= not link.is_connected

    fleet.scripts = {1: let_it_connect, 2: Fleet.finish}
    fleet.run()
    assert orders_of(fleet.rank(0), Begin) == [Begin((0, 2))]
    assert fleet.groups == [(0, 2), (0, 1, 2)]
    assert fleet.nodes_of(NodeLost) == fleet.nodes_of(NodeBack) == ["csd0"]
    assert fleet.lost_messages() == ["does not answer"]


def test_node_whose_link_never_connects_again_does_not_count_as_left(fleet: Fleet) -> None:
    """Its process answers over SSH, and the host would train alone for ever."""
    fleet.min_nodes = 2

    def break_for_good(fleet: Fleet) -> None:
        fleet.never_connect = {1}
        fleet.break_link(1)

    fleet.scripts[1] = break_for_good
    fleet.on_link = lambda link: setattr(link, "has_ended", not link.is_connected)
    error = fleet.run_to_error()
    assert "nodes left: 1, but at least 2 must take part" in error.message
    assert len([link for link in fleet.links if link.rank == 1]) >= fleet.patience.max_restarts


def test_process_that_ends_whenever_it_starts_is_not_restarted_for_ever(fleet: Fleet) -> None:
    def start(rank: ScriptedRank) -> None:
        if len(fleet.processes) <= 3:
            rank.report_ready()
        else:
            rank.exit("no memory")
            if len(fleet.processes) == 3 + fleet.patience.max_restarts:
                fleet.finish()

    fleet.on_start = start
    fleet.reachable = {1}
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    fleet.run()
    assert [process.rank for process in fleet.processes[3:]] == [1] * fleet.patience.max_restarts


def test_trial_ends_with_the_first_link_that_is_lost(fleet: Fleet) -> None:
    fleet.is_resumable, fleet.min_nodes = False, 2
    fleet.scripts[1] = lambda fleet: fleet.break_link(1, "cut")
    assert "its link was lost: cut" in fleet.run_to_error().message


def test_links_that_fail_while_a_node_is_off_do_not_count_against_its_process(fleet: Fleet) -> None:
    """Its connection is found to be dead later, and its process is then restarted."""

    def switch_off(fleet: Fleet) -> None:
        fleet.never_connect = {1}
        fleet.on_link = fail_often
        fleet.break_link(1)

    def fail_often(link: ScriptedLink) -> None:
        link.has_ended = not link.is_connected
        num_failed = sum(not each.is_connected for each in fleet.links)
        if link.has_ended and num_failed == 2 * fleet.patience.max_restarts:
            fleet.never_connect, fleet.reachable = set(), {1}
            fleet.rank(1).exit()

    fleet.scripts = {1: switch_off, 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert [process.rank for process in fleet.processes] == [0, 1, 2, 1]
