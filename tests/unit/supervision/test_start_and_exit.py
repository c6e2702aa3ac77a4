"""How a run starts and ends, and ranks that fail on their own."""

from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, DeadlineError, ExitCode, InputError, RunError
from csdctl.worker.protocol.events import Event, Joined, NodeBack, NodeLost, Progress
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedRank, shell


def test_run_is_complete_when_all_ranks_have_reported_completion(fleet: Fleet) -> None:
    fleet.scripts[1] = Fleet.finish
    fleet.run()
    assert fleet.groups == fleet.linked == [(0, 1, 2)]
    assert fleet.nodes_of(Joined) == ["host", "csd0", "csd1"]
    assert not fleet.nodes_of(NodeLost)


def test_absent_ranks_are_not_started(fleet: Fleet) -> None:
    fleet.absent = (1,)
    fleet.scripts[1] = Fleet.finish
    fleet.run()
    assert [process.rank for process in fleet.processes] == [0, 2]
    assert fleet.groups == [(0, 2)]


def test_run_on_the_host_alone_starts_no_mpirun(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, num_nodes=0)
    fleet.scripts[1] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0,)]
    assert not fleet.linked
    fleet.assert_nothing_left()


def test_rank_that_finishes_but_does_not_exit_is_named(fleet: Fleet) -> None:
    def finish_without_exiting(fleet: Fleet) -> None:
        for rank in fleet.members():
            rank.finish()
        fleet.rank(0).exit(is_clean=True)

    fleet.scripts[1] = finish_without_exiting
    assert "csd0, csd1 finished but did not exit" in fleet.run_to_error().message


@pytest.mark.fault(55)
def test_rank_that_crashes_after_its_completion_record_fails_the_run(fleet: Fleet) -> None:
    def crash_at_the_very_end(fleet: Fleet) -> None:
        for rank in fleet.members():
            rank.finish()
            rank.exit("rank exited with code 139", is_clean=rank.rank != 2)

    fleet.scripts[1] = crash_at_the_very_end
    error = fleet.run_to_error()
    assert (error.node, error.message) == ("csd1", "rank exited with code 139")


def test_ranks_that_do_not_start_in_time_are_named(fleet: Fleet) -> None:
    fleet.set_patience(start_s=0.1)
    fleet.on_start = lambda rank: rank.report_ready() if rank.rank == 0 else None
    error = fleet.run_to_error(DeadlineError)
    assert error.message == "csd0, csd1 did not start in time"
    assert error.exit_code == ExitCode.DEADLINE


@pytest.mark.parametrize(("exit_code", "error_type"), [(1, RunError), (2, InputError)])
def test_failure_before_all_ranks_are_ready_keeps_its_error_type(
    fleet: Fleet, exit_code: int, error_type: type[CsdctlError]
) -> None:
    def start(rank: ScriptedRank) -> None:
        if rank.rank == 1:
            rank.fail("no such file", remedy="repair it", exit_code=exit_code)

    fleet.on_start = start
    error = fleet.run_to_error(error_type)
    assert (error.node, error.message, error.remedy) == ("csd0", "no such file", "repair it")
    assert error.exit_code == exit_code


def test_rank_that_exits_before_it_is_ready_fails_the_run(fleet: Fleet) -> None:
    fleet.on_start = lambda rank: rank.exit("no memory") if rank.rank == 1 else rank.report_ready()
    error = fleet.run_to_error()
    assert (error.node, error.message) == ("csd0", "no memory")
    assert fleet.groups == []


def test_rank_that_exits_before_the_first_group_has_joined_fails_the_run(fleet: Fleet) -> None:
    fleet.never_join = {2}
    fleet.scripts[1] = lambda fleet: fleet.rank(2).exit()
    assert fleet.run_to_error().node == "csd1"
    assert fleet.groups == [(0, 1, 2)]


def test_mpirun_failure_at_the_first_attempt_fails_the_run_with_its_stderr(fleet: Fleet) -> None:
    fleet.never_join = {0, 1, 2}
    fleet.mpirun[1] = shell("echo there are no slots >&2; exit 1")
    assert "there are no slots" in fleet.run_to_error().message


def test_node_that_fails_is_lost_for_the_reason_it_reports(fleet: Fleet) -> None:
    fleet.min_nodes = 2
    fleet.scripts[1] = lambda fleet: fleet.rank(1).fail("disk full", remedy="make room")
    error = fleet.run_to_error()
    assert "csd0: disk full" in error.message
    assert "make room" in error.message
    assert len(fleet.lost_messages()) == 1


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
