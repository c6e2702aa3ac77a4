"""Lost ranks that are restarted and rejoin."""

from collections.abc import Callable

import pytest

from csdctl.worker.protocol.events import NodeBack, NodeLost, Paused
from csdctl.worker.protocol.orders import Order, PauseAtEpochEnd
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedRank, orders_of


@pytest.mark.parametrize("num_failed", [0, 1])
def test_node_that_returns_joins_at_the_end_of_the_epoch(fleet: Fleet, num_failed: int) -> None:
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
    assert fleet.groups == fleet.linked == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert fleet.nodes_of(NodeBack) == ["csd0"]
    assert fleet.nodes_of(Paused) == ["host", "csd1"]
    assert len(orders_of(fleet.rank(0), PauseAtEpochEnd)) == 1


def test_node_lost_during_a_pause_is_left_out_and_the_returned_node_joins(fleet: Fleet) -> None:
    def lose_one_of_two(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, PauseAtEpochEnd) and len(fleet.groups) == 2:
            fleet.rank(0).pause()
            fleet.rank(2).exit()

    fleet.has_short_epochs = False
    fleet.on_order = lose_one_of_two
    fleet.reachable = {1}

    def end_epochs(fleet: Fleet) -> None:
        fleet.has_short_epochs = True

    fleet.scripts = {1: lambda fleet: fleet.rank(1).exit(), 3: end_epochs, 4: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0,), (0, 1)]


@pytest.mark.parametrize("hangs", [False, True])
def test_others_wait_while_rank_0_restarts(fleet: Fleet, hangs: bool) -> None:
    """Also when it returns during a poll, which waits for a rank that hangs: it is not pinged, and stays."""

    def lose(fleet: Fleet) -> None:
        fleet.rank(1).is_hung = hangs
        fleet.rank(0).exit()

    fleet.reachable = {0}
    fleet.scripts = {1: lose, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2) if hangs else (0, 1, 2)]
    assert fleet.nodes_of(NodeBack) == ["host"]
    assert sorted(fleet.nodes_of(NodeLost)) == ["csd0"] * hangs + ["host"]


def test_run_fails_when_rank_0_cannot_be_restarted(fleet: Fleet) -> None:
    fleet.set_patience(start_s=scaled(1.0))
    fleet.scripts[1] = lambda fleet: fleet.rank(0).exit()
    error = fleet.run_to_error()
    assert (error.node, error.message) == ("host", "rank 0 was killed by signal 15")


@pytest.mark.parametrize("leave", [ScriptedRank.exit, lambda rank: rank.fail("disk full")])
def test_node_lost_while_rank_0_restarts_is_left_out(
    fleet: Fleet, leave: Callable[[ScriptedRank], None]
) -> None:
    """Rank 0 returns only when the supervisor waits for it alone.

    Without time to settle, the poll is over as soon as it has the answers of the others, which are in the
    queue before rank 0 is restarted.
    """

    def start(rank: ScriptedRank) -> None:
        if len(fleet.processes) > 3:
            leave(fleet.rank(1))
        rank.report_ready()

    def have_others_answered(rank: int) -> bool:
        others = [fleet.rank(other) for other in range(1, len(fleet.nodes))]
        return all(other.group is not None and other.answered == other.group.generation for other in others)

    fleet.on_start, fleet.may_restart = start, have_others_answered
    fleet.set_patience(settle_s=0.0)
    fleet.reachable = {0}
    fleet.scripts = {1: lambda fleet: fleet.rank(0).exit(), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert fleet.nodes_of(NodeLost) == ["host", "csd0"]


def test_rank_0_lost_more_often_fails_the_run_at_once(fleet: Fleet) -> None:
    def lose_host(fleet: Fleet) -> None:
        fleet.rank(0).step()
        fleet.rank(0).exit()

    fleet.reachable = {0}
    fleet.scripts = dict.fromkeys(range(1, fleet.patience.max_restarts + 2), lose_host)
    assert fleet.run_to_error().node == "host"
    assert len(fleet.nodes_of(NodeLost)) == fleet.patience.max_restarts + 1


@pytest.mark.parametrize("has_progress", [True, False])
def test_node_that_takes_part_in_the_end_of_an_epoch_may_restart_again(
    fleet: Fleet, has_progress: bool
) -> None:
    """Groups with the node, from which it is lost, and groups without, which end when it is back."""

    def lose_node(fleet: Fleet) -> None:
        fleet.rank(0).step(len(fleet.groups))  # not enough
        if has_progress:
            fleet.end_epoch()
        fleet.rank(1).exit()

    max_restarts = fleet.patience.max_restarts
    num_losses = 2 * max_restarts if has_progress else max_restarts + 1
    fleet.reachable = {1}
    fleet.scripts = dict.fromkeys(range(1, 2 * num_losses, 2), lose_node)
    fleet.scripts[2 * num_losses + 1 if has_progress else 2 * num_losses] = Fleet.finish
    fleet.run()
    assert fleet.nodes_of(NodeLost) == ["csd0"] * num_losses
    assert fleet.nodes_of(NodeBack) == ["csd0"] * (num_losses if has_progress else max_restarts)
