"""Ranks that fail on their own and report why."""

import pytest

from csdctl.errors import InputError
from csdctl.worker.protocol.events import Event, Failed, NodeBack, NodeLost, Progress
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedRank


def test_node_that_fails_is_lost_for_the_reason_it_reports(fleet: Fleet) -> None:
    fleet.min_nodes = 2
    fleet.scripts[1] = lambda fleet: fleet.rank(1).fail("disk full", remedy="make room")
    error = fleet.run_to_error()
    assert "csd0: disk full" in error.message
    assert "make room" in error.message
    assert len(fleet.lost_messages()) == 1


def test_two_nodes_that_fail_at_once_are_lost_for_their_own_reasons(fleet: Fleet) -> None:
    def fail_both(fleet: Fleet) -> None:
        fleet.rank(1).fail("disk full")
        fleet.rank(2).fail("no memory")

    fleet.scripts = {1: fail_both, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]
    assert [message.split(": ")[1] for message in fleet.lost_messages()] == ["disk full", "no memory"]


def test_failure_that_rank_0_reports_too_fails_the_run(fleet: Fleet) -> None:
    def diverge(fleet: Fleet) -> None:
        fleet.rank(1).fail("the loss became nan (csd0)")
        fleet.rank(0).fail("the loss became nan", remedy="lower it")

    fleet.set_patience(settle_s=scaled(10.0))  # for the failure of rank 0, which has been reported
    fleet.scripts[1] = diverge
    error = fleet.run_to_error()
    assert (error.node, error.message, error.remedy) == ("host", "the loss became nan", "lower it")
    assert not fleet.nodes_of(NodeLost)


@pytest.mark.parametrize("exit_code", [1, 2])
def test_node_that_fails_after_its_restart_stays_away(fleet: Fleet, exit_code: int) -> None:
    def start(rank: ScriptedRank) -> None:
        if len(fleet.processes) == 4:
            fleet.reachable = set()
            rank.fail("the shard is gone", exit_code=exit_code)
        else:
            rank.report_ready()

    def finish_without_it(event: Event) -> None:
        if isinstance(event, NodeLost) and len(fleet.processes) == 4:
            fleet.finish()

    fleet.on_start, fleet.on_event = start, finish_without_it
    fleet.reachable = {1}
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert "the shard is gone" in fleet.lost_messages()[1]


def test_no_message_is_lost_while_a_failure_is_investigated(fleet: Fleet) -> None:
    def report_ready_after_a_failure(event: Event) -> None:
        if isinstance(event, Progress):
            fleet.rank(1).fail("disk full")
            fleet.rank(2).report_ready()

    fleet.on_start = lambda rank: rank.step() if len(fleet.processes) == 4 else rank.report_ready()
    fleet.on_event = report_ready_after_a_failure
    fleet.reachable = {2}
    fleet.scripts = {1: lambda fleet: fleet.rank(2).exit(), 4: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 1), (0,), (0, 2)]
    assert fleet.nodes_of(NodeBack) == ["csd1"]


def test_invalid_input_that_rank_0_reports_fails_the_run(fleet: Fleet) -> None:
    fleet.scripts[1] = lambda fleet: fleet.rank(0).fail("no such metric", exit_code=2)
    assert fleet.run_to_error(InputError).node == "host"
    assert fleet.nodes_of(Failed) == ["host"]
