"""Ranks that send the others what no rank may send, as rank 0 reports them."""

import pytest

from csdctl.worker.protocol.events import LinkLost, Misbehaved, NodeLost
from tests.unit.supervision.scripted_ranks import Fleet


def accuse(fleet: Fleet, culprit: int, reporter: int = 0) -> None:
    rank = fleet.rank(reporter)
    rank.report(Misbehaved(reporter, rank.node, culprit, "sent 20 bytes, expected 100"))


def test_others_continue_without_a_rank_that_rank_0_reports(fleet: Fleet) -> None:
    fleet.scripts = {1: lambda fleet: accuse(fleet, 2), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 1)]
    assert fleet.nodes_of(NodeLost) == ["csd1"]
    assert "csd1: sent 20 bytes, expected 100" in fleet.lost_messages()[0]


def test_report_that_comes_after_the_others_lost_their_links_counts(fleet: Fleet) -> None:
    def lose(fleet: Fleet) -> None:
        fleet.rank(1).lose_link(1)
        accuse(fleet, 2)
        fleet.rank(0).lose_link(1)

    fleet.scripts = {1: lose, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 1)]
    assert len(fleet.nodes_of(LinkLost)) == 2


def test_report_of_a_node_is_not_believed(fleet: Fleet) -> None:
    def accuse_others(fleet: Fleet) -> None:
        accuse(fleet, 1, reporter=2)
        accuse(fleet, 0, reporter=2)
        fleet.finish()

    fleet.scripts = {1: accuse_others}
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]
    assert fleet.nodes_of(NodeLost) == []


@pytest.mark.parametrize("culprit", [-1, 0, 3, 10**9])
def test_report_of_no_node_changes_nothing(fleet: Fleet, culprit: int) -> None:
    def accuse_none(fleet: Fleet) -> None:
        accuse(fleet, culprit)
        fleet.finish()

    fleet.scripts = {1: accuse_none}
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]


def test_many_culprits_one_after_another_do_not_end_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each of these groups fails before a step; none of them fails without a cause."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), num_nodes=6)
    fleet.scripts = {
        generation: lambda fleet: accuse(fleet, fleet.groups[-1][-1]) for generation in range(1, 6)
    }
    fleet.scripts[6] = Fleet.finish
    fleet.run()
    assert fleet.groups[-1] == (0, 1)


def test_culprit_before_the_first_step_fails_the_run_and_is_named(fleet: Fleet) -> None:
    fleet.never_join = {0, 1, 2}
    fleet.scripts = {1: lambda fleet: accuse(fleet, 2)}
    error = fleet.run_to_error()
    assert error.node == "csd1"
    assert "sent 20 bytes" in error.message
