"""Nodes that report what is not so, and nodes that send what no rank may send."""

from collections.abc import Callable

import pytest

from csdctl.worker.protocol.events import Event, Finished, LinkLost, NodeLost, Warned
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, Script, ScriptedRank

EARLY = "rank 1 reported its completion before the run was complete"


def finish_early(fleet: Fleet) -> None:
    fleet.rank(1).finish()


def after(fleet: Fleet, event_type: type[Event], rank: int, *actions: Callable[[], None]) -> None:
    """Once an event of `rank` has been recorded, do `actions`."""

    def act(event: Event) -> None:
        if isinstance(event, event_type) and event.rank == rank:
            fleet.on_event = lambda event: None
            for action in actions:
                action()

    fleet.on_event = act


def exit_and_lose_link(fleet: Fleet) -> None:
    fleet.rank(1).exit(is_clean=True)
    fleet.rank(0).lose_link(1)


def train_on(fleet: Fleet) -> None:
    """Two nodes together: one is done too early, the other says that its link is lost; rank 0 goes on."""
    fleet.rank(2).lose_link(1)
    for _ in range(5):
        fleet.rank(0).step()


@pytest.mark.parametrize("then", [exit_and_lose_link, lambda fleet: fleet.rank(0).lose_link(1), train_on])
def test_node_that_is_done_before_rank_0_is_lost_alone(fleet: Fleet, then: Script) -> None:
    if then is train_on:
        fleet.set_patience(mpirun_exit_s=scaled(5.0))
    fleet.scripts = {1: finish_early, 2: Fleet.finish}
    after(fleet, Finished, 1, lambda: then(fleet))
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert EARLY in fleet.lost_messages()[0]


def test_honest_node_lost_after_another_was_done_too_early_does_not_end_the_run(fleet: Fleet) -> None:
    fleet.scripts = {1: finish_early, 2: Fleet.finish}
    after(fleet, Finished, 1, lambda: fleet.rank(2).exit(), lambda: fleet.rank(0).lose_link(1))
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]
    assert sorted(fleet.nodes_of(NodeLost)) == ["csd0", "csd1"]


@pytest.mark.parametrize(
    "fail", [lambda rank: rank.exit("killed by signal 11"), lambda rank: rank.fail("disk full", exit_code=2)]
)
def test_failure_of_a_node_after_its_completion_is_a_warning_once_all_have_finished(
    fleet: Fleet, fail: Callable[[ScriptedRank], None]
) -> None:
    def finish_others() -> None:
        fail(fleet.rank(1))
        for rank in (2, 0):
            fleet.rank(rank).finish()
            fleet.rank(rank).exit(is_clean=True)

    fleet.scripts[1] = finish_early
    after(fleet, Finished, 1, finish_others)
    fleet.run()
    assert {*fleet.nodes_of(Warned)} == {"csd0"}
    assert fleet.nodes_of(NodeLost) == []


def test_node_that_says_again_and_again_that_its_link_is_lost_is_left_out(fleet: Fleet) -> None:
    def lose_link(fleet: Fleet) -> None:
        fleet.rank(1).lose_link(len(fleet.groups))

    fleet.scripts = dict.fromkeys(range(1, fleet.patience.max_attempts + 1), lose_link)
    fleet.scripts[fleet.patience.max_attempts + 1] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * fleet.patience.max_attempts + [(0, 2)]
    assert "repeatedly loses its link" in fleet.lost_messages()[0]


def test_node_that_never_joins_is_left_out(fleet: Fleet) -> None:
    def stop_joining(fleet: Fleet) -> None:
        fleet.never_join = {1}
        fleet.rank(0).lose_link(1)

    fleet.set_patience(join_s=scaled(0.5), join_per_rank_s=0.0)
    fleet.scripts = {1: stop_joining, 4: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * 3 + [(0, 2)]
    assert "does not join the others" in fleet.lost_messages()[0]


def test_report_that_comes_after_the_others_lost_their_links_counts(fleet: Fleet) -> None:
    def lose(fleet: Fleet) -> None:
        fleet.rank(1).lose_link(1)
        fleet.rank(0).accuse(2)
        fleet.rank(0).lose_link(1)

    fleet.scripts = {1: lose, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 1)]
    assert len(fleet.nodes_of(LinkLost)) == 2


@pytest.mark.parametrize(("reporter", "culprit"), [(2, 1), (2, 0), (0, -1), (0, 0), (0, 3), (0, 10**9)])
def test_report_of_a_node_or_of_no_node_changes_nothing(fleet: Fleet, reporter: int, culprit: int) -> None:
    def accuse_and_finish(fleet: Fleet) -> None:
        fleet.rank(reporter).accuse(culprit)
        fleet.finish()

    fleet.scripts[1] = accuse_and_finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]
    assert fleet.nodes_of(NodeLost) == []


@pytest.mark.parametrize(
    "lose",
    [
        lambda fleet: fleet.rank(0).accuse(fleet.groups[-1][-1]),
        lambda fleet: fleet.rank(fleet.groups[-1][-1]).exit(),
    ],
    ids=["culprit", "exit"],
)
def test_many_losses_one_after_another_do_not_end_the_run(
    tmp_path_factory: pytest.TempPathFactory, lose: Script
) -> None:
    """Each of these groups fails before a step; none of them fails without a cause."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), num_nodes=6)
    fleet.scripts = dict.fromkeys(range(1, 6), lose)
    fleet.scripts[6] = Fleet.finish
    fleet.run()
    assert fleet.groups[-1] == (0, 1)


@pytest.mark.parametrize(
    ("silent", "node", "words"),
    [({1}, "csd0", "does not join the others"), ({0, 1, 2}, "csd1", "sent 20 bytes")],
)
def test_node_at_fault_in_the_first_group_fails_the_run_and_is_named(
    fleet: Fleet, silent: set[int], node: str, words: str
) -> None:
    fleet.set_patience(join_s=scaled(0.5), join_per_rank_s=0.0)
    fleet.never_join = silent
    fleet.scripts[1] = lambda fleet: fleet.rank(0).accuse(2) if node == "csd1" else None
    error = fleet.run_to_error()
    assert (error.node, words in error.message) == (node, True)
