"""How a run starts and ends, ranks that fail on their own, and mpirun that exits while they are alive."""

from collections.abc import Callable

import pytest

from csdctl.errors import CsdctlError, DeadlineError, ExitCode, InputError, RunError
from csdctl.worker.protocol.events import (
    Event,
    Exited,
    Joined,
    NodeBack,
    NodeLost,
    Progress,
    Warned,
    event_to_line,
)
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedRank, shell


@pytest.mark.parametrize(("absent", "group"), [((), (0, 1, 2)), ((1,), (0, 2)), ((1, 2), (0,))])
def test_run_is_complete_when_all_ranks_but_absent_ones_have_reported_completion(
    fleet: Fleet, absent: tuple[int, ...], group: tuple[int, ...]
) -> None:
    fleet.absent = absent
    fleet.scripts[1] = Fleet.finish
    fleet.run()
    assert fleet.groups == [group]
    assert fleet.linked == [group] * (len(group) > 1)  # the host alone needs no mpirun
    assert [process.rank for process in fleet.processes] == [*group]
    assert fleet.nodes_of(Joined) == [fleet.nodes[rank] for rank in group]
    assert not fleet.nodes_of(NodeLost)


def crash_at_the_very_end(rank: ScriptedRank) -> None:
    rank.exit("rank exited with code 139", is_clean=rank.rank != 2)


@pytest.mark.fault(55)
@pytest.mark.parametrize(
    ("end", "problems"),
    [
        (crash_at_the_very_end, {"csd1": "rank exited with code 139"}),
        (lambda rank: None, {"csd0": "rank 1 did not exit", "csd1": "rank 2 did not exit"}),
    ],
    ids=["crash", "no exit"],
)
def test_run_that_all_ranks_have_finished_is_complete_however_they_end(
    fleet: Fleet, end: Callable[[ScriptedRank], None], problems: dict[str, str]
) -> None:
    def finish(fleet: Fleet) -> None:
        for rank in fleet.members():
            rank.finish()
            end(rank) if rank.rank else rank.exit(is_clean=True)

    fleet.scripts[1] = finish
    fleet.run()
    warnings = {event.node: event.message for event in fleet.events if isinstance(event, Warned)}
    suffix = ", when it had finished its part of the run"
    assert warnings == {node: problem + suffix for node, problem in problems.items()}


def test_ranks_that_do_not_start_in_time_are_named(fleet: Fleet) -> None:
    fleet.set_patience(start_s=0.1)
    fleet.on_start = lambda rank: rank.report_ready() if rank.rank == 0 else None
    error = fleet.run_to_error(DeadlineError)
    assert error.message == "csd0, csd1 did not start in time"
    assert error.exit_code == ExitCode.DEADLINE


@pytest.mark.parametrize(("exit_code", "error_type", "node"), [(1, RunError, "csd0"), (2, InputError, "")])
def test_failure_before_all_ranks_are_ready_keeps_its_error_type(
    fleet: Fleet, exit_code: int, error_type: type[CsdctlError], node: str
) -> None:
    message = "no such file" if node else "recipe.metrics fails"

    def start(rank: ScriptedRank) -> None:
        if rank.rank == 1:
            rank.fail(message, remedy="see this rank's log", exit_code=exit_code)

    fleet.on_start = start
    error = fleet.run_to_error(error_type)
    assert (error.node, error.message) == (node, message)
    assert error.remedy.endswith("/rank-1.log")
    assert error.exit_code == exit_code


@pytest.mark.parametrize("is_ready", [False, True])
def test_rank_that_exits_before_the_first_group_has_joined_fails_the_run(
    fleet: Fleet, is_ready: bool
) -> None:
    if is_ready:
        fleet.never_join = {2}
        fleet.scripts[1] = lambda fleet: fleet.rank(2).exit("no memory")
    else:
        fleet.on_start = lambda rank: rank.exit("no memory") if rank.rank == 2 else rank.report_ready()
    error = fleet.run_to_error()
    assert (error.node, error.message) == ("csd1", "no memory")
    assert fleet.groups == [(0, 1, 2)] * is_ready


def test_mpirun_failure_at_the_first_attempt_fails_the_run_with_its_stderr(fleet: Fleet) -> None:
    fleet.never_join = {0, 1, 2}
    fleet.mpirun[1] = shell("echo there are no slots >&2; exit 1")
    assert "there are no slots" in fleet.run_to_error().message


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


@pytest.mark.parametrize("exit_code", [0, 1])
def test_mpirun_that_exits_is_started_again_and_says_who_was_killed(fleet: Fleet, exit_code: int) -> None:
    killed = event_to_line(Exited(1, "csd0", 137))
    fleet.mpirun[1] = shell(f"echo '[1,1]<stdout>: {killed}'; exit {exit_code}")
    fleet.scripts[2] = Fleet.finish
    fleet.run()
    assert fleet.nodes_of(Exited) == ["csd0"]
    assert fleet.groups == fleet.linked == [(0, 1, 2)] * 2


def test_lost_link_of_a_rank_that_answers_is_recorded_and_that_of_a_lost_one_is_not(fleet: Fleet) -> None:
    fleet.mpirun[1] = shell("echo 'Remote daemon: [prterun-host-1@0,2] on node csd1'; exit 1")
    fleet.scripts[2] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * 2
    (warned,) = (event for event in fleet.events if isinstance(event, Warned))
    assert (warned.rank, warned.node) == (2, "csd1")
    assert warned.message.startswith("its MPI daemon no longer answers")


def test_run_fails_after_too_many_failed_groups_in_a_row(fleet: Fleet) -> None:
    fleet.mpirun = dict.fromkeys(range(1, 9), shell("echo no route >&2; exit 1"))
    assert "no route" in fleet.run_to_error().message
    assert len(fleet.groups) == 1 + fleet.patience.max_attempts


@pytest.mark.parametrize("reporter", [0, 1])
def test_step_that_rank_0_reports_and_no_other_resets_the_count_of_failed_groups(
    fleet: Fleet, reporter: int
) -> None:
    def step_and_break(fleet: Fleet) -> None:
        fleet.rank(reporter).step()
        fleet.rank(0).lose_link(len(fleet.groups))

    num_groups = 1 + fleet.patience.max_attempts
    fleet.scripts = dict.fromkeys(range(1, num_groups + 3), step_and_break)
    fleet.scripts[num_groups + 3] = Fleet.finish
    if reporter == 0:
        fleet.run()
        assert len(fleet.groups) == num_groups + 3
    else:
        fleet.run_to_error()
        assert len(fleet.groups) == num_groups


@pytest.mark.parametrize(("rank", "group"), [(1, (0, 2)), (0, (0, 1, 2))])
def test_node_that_mpirun_blames_repeatedly_is_left_out_and_the_host_is_restarted(
    fleet: Fleet, rank: int, group: tuple[int, ...]
) -> None:
    killed = f"process rank {rank} with PID 7 on node {fleet.nodes[rank]} exited on signal 9 (Killed)."
    blaming = shell(f"echo 'prterun noticed that {killed}' >&2; exit 1")
    fleet.mpirun = dict.fromkeys((1, 2, 3), blaming)
    fleet.reachable = {0}
    fleet.scripts[4] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * 3 + [group]
    assert fleet.nodes_of(NodeLost) == [fleet.nodes[rank]]
    assert fleet.nodes_of(NodeBack) == ["host"] * (rank == 0)


def test_failed_run_does_not_blame_a_node_lost_long_ago(fleet: Fleet) -> None:
    fleet.scripts = {1: lambda fleet: fleet.rank(1).exit(), 2: lambda fleet: fleet.rank(0).step()}
    fleet.mpirun = dict.fromkeys(range(2, 9), shell("echo no route >&2; exit 1"))
    error = fleet.run_to_error()
    assert "no route" in error.message
    assert error.node == ""


def test_restarting_rank_is_not_dropped_for_its_earlier_loss(fleet: Fleet) -> None:
    def lose_link(fleet: Fleet) -> None:
        fleet.rank(0).lose_link(len(fleet.groups))

    fleet.on_start = lambda rank: rank.report_ready() if len(fleet.processes) <= 3 else None
    fleet.reachable = {1}
    fleet.may_restart = lambda rank: True
    fleet.scripts = dict.fromkeys(range(1, fleet.patience.max_attempts), lose_link)
    fleet.scripts[fleet.patience.max_attempts] = lambda fleet: fleet.rank(1).exit()
    fleet.scripts[fleet.patience.max_attempts + 1] = Fleet.finish
    fleet.run()
    assert len(fleet.processes) == 4
    assert fleet.nodes_of(NodeLost) == ["csd0"]
