"""What supervision does about everything that can happen to a run, with ranks that follow a script."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, DeadlineError, ExitCode, InputError, RunError
from csdctl.launch import links, rank_processes
from csdctl.supervision import supervisor as supervise
from csdctl.worker.protocol.events import (
    Event,
    Failed,
    Finished,
    Joined,
    LinkLost,
    NodeBack,
    NodeLost,
    Paused,
    Progress,
    Ready,
)
from csdctl.worker.protocol.orders import FormGroup, Order, PauseAtEpochEnd, Ping, Stop
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedRank, Waits, shell

pytestmark = pytest.mark.timeout(10)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ANSWER_S": 0.3,
        "LEAST_ANSWER_S": 0.1,
        "SETTLE_S": 0.02,
        "LOOK_S": 0.02,
        "STALL_S": 0.1,
        "ASK_INTERVAL_S": 0.05,
        "END_S": 0.3,
    }.items():
        monkeypatch.setattr(supervise, name, value)
    monkeypatch.setattr(links, "GOOD_END_S", 0.1)
    monkeypatch.setattr(rank_processes, "RETURN_INTERVAL_S", 0.01)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Two nodes; however the run ends, nothing may be left of it."""
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.assert_nothing_left()


def error_of(fleet: Fleet, kind: type[CsdctlError] = RunError) -> CsdctlError:
    with pytest.raises(CsdctlError) as caught:
        fleet.run()
    assert type(caught.value) is kind
    return caught.value


def lost_messages(fleet: Fleet) -> list[str]:
    return [event.message for event in fleet.events if isinstance(event, NodeLost)]


def orders_of(rank: ScriptedRank, kind: type[Order]) -> list[Order]:
    return [order for order in rank.orders if isinstance(order, kind)]


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


# A run in which nothing is lost.


def test_run_of_all_ranks_ends_with_their_completion_records(fleet: Fleet) -> None:
    fleet.stories[1] = Fleet.finish
    fleet.run()
    assert fleet.groups == fleet.built == [(0, 1, 2)]
    assert fleet.said(Joined) == ["host", "csd0", "csd1"]
    assert not fleet.said(NodeLost)


def test_ranks_that_are_absent_are_not_started(fleet: Fleet) -> None:
    fleet.absent = (1,)
    fleet.stories[1] = Fleet.finish
    fleet.run()
    assert [process.rank for process in fleet.processes] == [0, 2]
    assert fleet.groups == [(0, 2)]


def test_run_of_the_host_alone_needs_no_links(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, num_nodes=0)
    fleet.stories[1] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0,)]
    assert not fleet.built
    fleet.assert_nothing_left()


def test_rank_that_finished_and_does_not_end_is_named(fleet: Fleet) -> None:
    def finish_without_leaving(fleet: Fleet) -> None:
        for rank in fleet.members():
            rank.finish()
        fleet.rank(0).end(is_clean=True)

    fleet.stories[1] = finish_without_leaving
    assert "csd0, csd1 finished and did not end" in error_of(fleet).message


@pytest.mark.fault(55)
def test_rank_that_ends_badly_after_its_completion_record_fails_the_run(fleet: Fleet) -> None:
    def crash_at_the_very_end(fleet: Fleet) -> None:
        for rank in fleet.members():
            rank.finish()
            rank.end("rank ended with exit code 139", is_clean=rank.rank != 2)

    fleet.stories[1] = crash_at_the_very_end
    error = error_of(fleet)
    assert (error.node, error.message) == ("csd1", "rank ended with exit code 139")


# Before the first step every failure is fatal.


def test_ranks_that_do_not_start_in_time_are_named(fleet: Fleet) -> None:
    fleet.waits = Waits(start_s=0.1)
    fleet.begin = lambda rank: rank.be_ready() if rank.rank == 0 else None
    error = error_of(fleet, DeadlineError)
    assert error.message == "csd0, csd1 did not start in time"
    assert error.exit_code == ExitCode.DEADLINE


def test_rank_that_ends_before_it_is_ready_ends_the_run(fleet: Fleet) -> None:
    fleet.begin = lambda rank: rank.be_ready() if rank.rank != 2 else rank.end("no python3")
    error = error_of(fleet)
    assert (error.node, error.message, error.exit_code) == ("csd1", "no python3", ExitCode.FAILED)


@pytest.mark.parametrize(("exit_code", "kind"), [(1, RunError), (2, InputError)])
def test_failure_before_all_are_ready_keeps_its_kind(
    fleet: Fleet, exit_code: int, kind: type[CsdctlError]
) -> None:
    def begin(rank: ScriptedRank) -> None:
        if rank.rank == 1:
            rank.fail("no such file", remedy="mend it", exit_code=exit_code)

    fleet.begin = begin
    error = error_of(fleet, kind)
    assert (error.node, error.message, error.remedy) == ("csd0", "no such file", "mend it")
    assert error.exit_code == exit_code


def test_rank_that_ends_before_the_ranks_have_met_ends_the_run(fleet: Fleet) -> None:
    fleet.never_join = {2}
    fleet.stories[1] = lambda fleet: fleet.rank(2).end()
    assert error_of(fleet).node == "csd1"
    assert fleet.groups == [(0, 1, 2)]


def test_failure_before_the_ranks_have_met_ends_the_run(fleet: Fleet) -> None:
    fleet.never_join = {2}
    fleet.stories[1] = lambda fleet: fleet.rank(2).fail("no socket")
    error = error_of(fleet)
    assert (error.node, error.message) == ("csd1", "no socket")


def test_mpirun_that_fails_at_the_first_attempt_ends_the_run_with_its_words(fleet: Fleet) -> None:
    fleet.never_join = {0, 1, 2}
    fleet.mpirun[1] = shell("echo there are no slots >&2; exit 1")
    assert "there are no slots" in error_of(fleet).message


def test_ranks_that_do_not_meet_at_all_end_the_run(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "JOIN_S", 0.05)
    monkeypatch.setattr(supervise, "JOIN_EACH_S", 0.01)
    fleet.never_join = {1}
    error_of(fleet)
    assert fleet.groups == [(0, 1, 2)]


# A rank is lost in training.


def test_others_go_on_without_a_rank_that_ends(fleet: Fleet) -> None:
    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == fleet.built == [(0, 1, 2), (0, 2)]
    assert fleet.said(NodeLost) == ["csd0"]
    assert "killed by signal 15" in lost_messages(fleet)[0]
    group = orders_of(fleet.rank(2), FormGroup)[-1]
    assert isinstance(group, FormGroup)
    assert group.generation == 2
    asked = [type(order) for order in fleet.rank(0).orders]
    assert asked == [FormGroup, Ping, FormGroup]


def test_group_of_the_same_ranks_keeps_its_collective(fleet: Fleet) -> None:
    fleet.stories = {1: lambda fleet: fleet.rank(0).lose_link(1), 2: Fleet.finish}
    fleet.run()
    first, second = orders_of(fleet.rank(0), FormGroup)
    assert isinstance(first, FormGroup)
    assert isinstance(second, FormGroup)
    assert (first.collective, second.collective) == ("", "star")
    assert first.ranks == second.ranks == (0, 1, 2)


def test_host_goes_on_alone_when_all_nodes_are_lost_at_once(fleet: Fleet) -> None:
    def lose_all_nodes(fleet: Fleet) -> None:
        fleet.rank(1).end()
        fleet.rank(2).end()

    fleet.stories = {1: lose_all_nodes, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]
    assert fleet.built == [(0, 1, 2)]
    assert fleet.said(NodeLost) == ["csd0", "csd1"]


def test_rank_lost_while_regrouping_is_left_out_as_well(fleet: Fleet) -> None:
    def die_when_asked(rank: ScriptedRank, order: Order) -> None:
        if rank.rank == 2 and isinstance(order, Ping):
            rank.end()

    fleet.on_order = die_when_asked
    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]


def test_rank_that_fails_while_regrouping_is_left_out_with_its_message(fleet: Fleet) -> None:
    def fail_when_asked(rank: ScriptedRank, order: Order) -> None:
        if rank.rank == 2 and isinstance(order, Ping):
            rank.fail("disk full")

    fleet.on_order = fail_when_asked
    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]
    assert "disk full" in lost_messages(fleet)[1]


def test_failure_of_rank_0_while_regrouping_ends_the_run(fleet: Fleet) -> None:
    def fail_when_asked(rank: ScriptedRank, order: Order) -> None:
        if rank.rank == 0 and isinstance(order, Ping):
            rank.fail("disk full")

    fleet.on_order = fail_when_asked
    fleet.stories[1] = lambda fleet: fleet.rank(1).end()
    error = error_of(fleet)
    assert (error.node, error.message) == ("host", "disk full")


def test_rank_that_does_not_answer_is_left_out(fleet: Fleet) -> None:
    def hang(fleet: Fleet) -> None:
        fleet.rank(1).is_deaf = True
        fleet.rank(0).lose_link(1)

    fleet.stories = {1: hang, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert "no longer answers" in lost_messages(fleet)[0]
    assert next(one for one in fleet.processes if one.rank == 1).is_closed


def test_too_few_nodes_left_end_the_run(fleet: Fleet) -> None:
    fleet.min_nodes = 2
    fleet.stories[1] = lambda fleet: fleet.rank(1).end()
    error = error_of(fleet)
    assert "1 nodes are left, and --min-nodes is 2" in error.message
    assert "csd0: rank 1 was killed by signal 15" in error.message
    assert "csd1" not in error.message
    assert "csdctl train --resume" in error.remedy


def test_rank_that_others_wait_for_in_vain_is_lost(fleet: Fleet) -> None:
    def stop_one(fleet: Fleet) -> None:
        fleet.rank(2).is_deaf = True
        fleet.rank(0).wait_for("csd0", "csd1")

    fleet.stories = {1: stop_one, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 1)]
    assert "is stopped, or its machine hangs" in lost_messages(fleet)[0]
    assert len(orders_of(fleet.rank(1), Ping)) == 2  # it answered when asked, and while regrouping


@pytest.mark.parametrize("teller", [0, 2])
def test_rank_that_is_waited_for_by_one_who_does_not_know_for_whom_is_lost(fleet: Fleet, teller: int) -> None:
    def hang(fleet: Fleet) -> None:
        fleet.rank(1).is_deaf = True
        fleet.rank(teller).wait_for()

    fleet.stories[1] = hang
    fleet.stories[2] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert "is stopped, or its machine hangs" in lost_messages(fleet)[0]


def test_two_ranks_that_hang_at_once_are_both_left_out(fleet: Fleet) -> None:
    def stop_both(fleet: Fleet) -> None:
        fleet.rank(1).is_deaf = fleet.rank(2).is_deaf = True
        fleet.rank(0).wait_for("csd0", "csd1")

    fleet.stories = {1: stop_both, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]
    assert sorted(fleet.said(NodeLost)) == ["csd0", "csd1"]


def test_rank_that_is_slow_and_answers_stays(fleet: Fleet) -> None:
    def go_on(event: Event) -> None:
        if isinstance(event, Progress):
            fleet.finish()

    def wait(fleet: Fleet) -> None:
        fleet.rank(0).wait_for("csd1")
        fleet.rank(2).step()

    fleet.on_event = go_on
    fleet.stories[1] = wait
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]
    assert len(orders_of(fleet.rank(2), Ping)) == 1


def test_run_in_which_nobody_does_a_step_ends_at_the_silence_deadline(fleet: Fleet) -> None:
    fleet.waits = Waits(silence_s=0.3)
    error = error_of(fleet, DeadlineError)
    assert "no rank has done a step for too long" in error.message
    assert "logs:" in error.remedy


def test_silence_counts_anew_with_every_group(fleet: Fleet) -> None:
    def hang(fleet: Fleet) -> None:
        fleet.rank(1).is_deaf = fleet.rank(2).is_deaf = True
        fleet.rank(0).lose_link(1)

    fleet.waits = Waits(silence_s=supervise.ANSWER_S)  # regrouping takes as long as two do not answer
    fleet.stories = {1: hang, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]


def test_words_of_an_earlier_group_are_ignored(fleet: Fleet) -> None:
    def come_late(fleet: Fleet) -> None:
        fleet.rank(0).lose_link(1)
        fleet.rank(2).lose_link(1)
        fleet.rank(2).say(Paused(2, "csd1", 1))
        fleet.rank(0).say(Paused(0, "host", 1))
        fleet.finish()

    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 2: come_late}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert len(fleet.said(LinkLost)) == 2


def test_late_joined_of_an_earlier_group_does_not_complete_the_new_one(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "JOIN_S", 0.05)
    monkeypatch.setattr(supervise, "JOIN_EACH_S", 0.0)

    def join_late(fleet: Fleet) -> None:
        fleet.rank(2).join(FormGroup(1, (0, 1, 2)))

    def lose_one(fleet: Fleet) -> None:
        fleet.never_join = {2}
        fleet.rank(1).end()

    fleet.stories = {1: lose_one, 2: join_late, 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 2)]


def test_node_lost_after_others_finished_leaves_the_run_incomplete(fleet: Fleet) -> None:
    def lose_one_at_the_end(fleet: Fleet) -> None:
        for rank in (0, 1):
            fleet.rank(rank).finish()
            fleet.rank(rank).end(is_clean=True)
        fleet.rank(2).end()

    fleet.stories[1] = lose_one_at_the_end
    error = error_of(fleet)
    assert error.node == "csd1"
    assert "killed by signal 15" in error.message
    assert "no completion record from csd1" in error.message


def finish_when_asked(fleet: Fleet, *ranks: int) -> None:
    """Let mpirun end badly when the ranks need it no longer: they finish while they are asked."""

    def finish(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Ping) and rank.rank in ranks:
            rank.finish()
            rank.end(is_clean=True)

    fleet.on_order = finish
    fleet.mpirun[1] = shell("exit 1")


def test_run_that_finishes_while_mpirun_ends_badly_is_complete(fleet: Fleet) -> None:
    finish_when_asked(fleet, 0, 1, 2)
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]


def test_rank_that_finishes_later_than_others_is_awaited_after_mpirun_ended_badly(fleet: Fleet) -> None:
    def save_the_model(event: Event) -> None:
        if fleet.said(Finished) == ["csd0", "csd1"]:
            fleet.on_event = lambda event: None
            fleet.rank(0).finish()
            fleet.rank(0).end(is_clean=True)

    finish_when_asked(fleet, 1, 2)
    fleet.on_event = save_the_model
    fleet.run()
    assert fleet.groups == [(0, 1, 2)]


def test_rank_that_can_no_longer_finish_with_the_others_ends_the_run(fleet: Fleet) -> None:
    finish_when_asked(fleet, 0, 1)
    fleet.mpirun.clear()
    fleet.stories[1] = lambda fleet: fleet.rank(2).lose_link(1)
    assert "no completion record from csd1" in error_of(fleet).message
    assert fleet.groups == [(0, 1, 2)]


# mpirun ends, the ranks are there.


@pytest.mark.parametrize("exit_code", [0, 1])
def test_mpirun_that_ends_is_started_again(fleet: Fleet, exit_code: int) -> None:
    fleet.mpirun[1] = shell(f"exit {exit_code}")
    fleet.stories[2] = Fleet.finish
    fleet.run()
    assert fleet.groups == fleet.built == [(0, 1, 2)] * 2


def test_run_is_given_up_when_groups_come_to_nothing_again_and_again(fleet: Fleet) -> None:
    fleet.mpirun = {number: shell("echo no route >&2; exit 1") for number in range(1, 9)}
    error = error_of(fleet)
    assert "no route" in error.message
    assert len(fleet.groups) == 1 + supervise.MAX_ATTEMPTS


def test_steps_make_earlier_failures_forgotten(fleet: Fleet) -> None:
    def step_and_break(fleet: Fleet) -> None:
        fleet.rank(0).step()
        fleet.rank(0).lose_link(len(fleet.groups))

    fleet.stories = dict.fromkeys(range(1, 6), step_and_break)
    fleet.stories[6] = Fleet.finish
    fleet.run()
    assert len(fleet.groups) == 6


def test_short_epochs_make_earlier_failures_forgotten(fleet: Fleet) -> None:
    def end_epoch_and_break(fleet: Fleet) -> None:
        fleet.end_epoch()  # with too few steps for anybody to tell of its progress
        fleet.rank(0).lose_link(len(fleet.groups))

    fleet.stories = dict.fromkeys(range(1, 6), end_epoch_and_break)
    fleet.stories[6] = Fleet.finish
    fleet.run()
    assert len(fleet.groups) == 6


def test_node_that_mpirun_blames_again_and_again_is_left_out(fleet: Fleet) -> None:
    blame = "prterun noticed that process rank 1 with PID 7 on node csd0 exited on signal 9 (Killed)."
    fleet.mpirun = {number: shell(f"echo '{blame}' >&2; exit 1") for number in (1, 2, 3)}
    fleet.stories[4] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * 3 + [(0, 2)]
    assert fleet.said(NodeLost) == ["csd0"]


def lose_one_early(fleet: Fleet) -> None:
    """Rank 1 is lost for a reason of its own, long before anything else happens."""
    fleet.stories[1] = lambda fleet: fleet.rank(1).end("killed by signal 9")


def test_run_that_is_given_up_does_not_blame_a_node_that_was_lost_long_ago(fleet: Fleet) -> None:
    lose_one_early(fleet)
    fleet.stories[2] = lambda fleet: fleet.rank(0).step()
    fleet.mpirun = {number: shell("echo no route >&2; exit 1") for number in range(2, 9)}
    error = error_of(fleet)
    assert "no route" in error.message
    assert error.node == ""


def test_node_that_mpirun_blames_is_left_out_though_another_was_lost_long_ago(fleet: Fleet) -> None:
    lose_one_early(fleet)
    fleet.stories[2] = lambda fleet: fleet.rank(0).step()
    blame = "prterun noticed that process rank 1 with PID 7 on node csd1 exited on signal 9 (Killed)."
    fleet.mpirun = {number: shell(f"echo '{blame}' >&2; exit 1") for number in (2, 3, 4)}
    fleet.stories[5] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 2), (0, 2), (0,)]


@pytest.mark.parametrize("do", [ScriptedRank.finish, ScriptedRank.pause])
def test_rank_that_stops_when_others_have_finished_or_paused_is_lost(
    fleet: Fleet, do: Callable[[ScriptedRank], None]
) -> None:
    def stop_at_the_end(fleet: Fleet) -> None:
        fleet.rank(1).is_deaf = True
        do(fleet.rank(0))
        do(fleet.rank(2))

    fleet.stories[1] = stop_at_the_end
    fleet.stories[2] = Fleet.finish
    if do is ScriptedRank.finish:
        assert error_of(fleet).node == "csd0"
    else:
        fleet.run()
        assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert "is stopped, or its machine hangs" in lost_messages(fleet)[0]


def test_incomplete_run_names_the_node_whose_completion_record_is_missing(fleet: Fleet) -> None:
    def lose_one_at_the_end(fleet: Fleet) -> None:
        fleet.rank(0).finish()
        fleet.rank(2).end("killed by signal 7")

    lose_one_early(fleet)
    fleet.stories[2] = lose_one_at_the_end
    error = error_of(fleet)
    assert (error.node, error.message.splitlines()[0]) == ("csd1", "killed by signal 7")


def test_rank_that_is_starting_again_is_not_ended_for_its_earlier_loss(fleet: Fleet) -> None:
    def lose_link(fleet: Fleet) -> None:
        fleet.rank(0).lose_link(len(fleet.groups))

    fleet.begin = lambda rank: rank.be_ready() if len(fleet.processes) <= 3 else None
    fleet.reachable = {1}
    fleet.may_return = lambda rank: True
    fleet.stories = dict.fromkeys(range(1, supervise.MAX_ATTEMPTS), lose_link)
    fleet.stories[supervise.MAX_ATTEMPTS] = lambda fleet: fleet.rank(1).end()
    fleet.stories[supervise.MAX_ATTEMPTS + 1] = Fleet.finish
    fleet.run()
    assert len(fleet.processes) == 4
    assert fleet.said(NodeLost) == ["csd0"]


# Nodes come back.


def test_node_that_comes_back_joins_at_the_end_of_the_epoch(fleet: Fleet) -> None:
    fleet.reachable = {1}
    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == fleet.built == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert fleet.said(NodeBack) == ["csd0"]
    assert fleet.said(Paused) == ["host", "csd1"]
    assert len(orders_of(fleet.rank(0), PauseAtEpochEnd)) == 1


def test_node_that_is_lost_again_and_again_stays_away(fleet: Fleet) -> None:
    fleet.reachable = {1}

    def lose_it_again(fleet: Fleet) -> None:
        fleet.rank(0).step()
        if 1 in fleet.groups[-1]:
            fleet.rank(1).end()
        elif len(fleet.said(NodeLost)) > supervise.MAX_RETURNS:
            fleet.finish()

    fleet.stories = dict.fromkeys(range(1, 20), lose_it_again)
    fleet.run()
    assert fleet.said(NodeBack) == ["csd0"] * supervise.MAX_RETURNS
    assert fleet.said(NodeLost) == ["csd0"] * (supervise.MAX_RETURNS + 1)
    assert fleet.groups[-1] == (0, 2)


def test_pause_is_asked_for_again_when_another_node_is_lost_before_it(fleet: Fleet) -> None:
    def lose_another(fleet: Fleet) -> None:
        fleet.has_short_epochs = True
        fleet.rank(2).end()

    fleet.has_short_epochs = False
    fleet.reachable = {1}
    fleet.on_event = lambda event: lose_another(fleet) if isinstance(event, NodeBack) else None
    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 4: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0,), (0, 1)]


def test_node_that_is_back_while_others_regroup_joins_at_the_end_of_the_epoch(fleet: Fleet) -> None:
    def be_back_late(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Ping) and rank.rank == 0 and len(fleet.groups) == 2:
            fleet.rank(1).be_ready()

    def lose_another(event: Event) -> None:
        if isinstance(event, NodeLost) and event.rank == 1:
            fleet.begin = lambda rank: fleet.rank(2).end()  # rank 1 is there, and not ready yet

    fleet.on_order, fleet.on_event = be_back_late, lose_another
    fleet.reachable = {1}
    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 4: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0,), (0, 1)]


def test_node_lost_while_the_others_have_paused_is_left_out_and_the_one_that_is_back_joins(
    fleet: Fleet,
) -> None:
    def lose_one_of_two(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, PauseAtEpochEnd) and len(fleet.groups) == 2:
            fleet.rank(0).pause()
            fleet.rank(2).end()

    fleet.has_short_epochs = False
    fleet.on_order = lose_one_of_two
    fleet.reachable = {1}

    def end_epochs(fleet: Fleet) -> None:
        fleet.has_short_epochs = True

    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 3: end_epochs, 4: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0,), (0, 1)]


def test_returning_rank_that_ends_before_it_is_ready_is_tried_again(fleet: Fleet) -> None:
    def begin(rank: ScriptedRank) -> None:
        if len(fleet.processes) == 4:
            rank.end("no memory")
        else:
            rank.be_ready()

    fleet.begin = begin
    fleet.reachable = {1}
    fleet.stories = {1: lambda fleet: fleet.rank(1).end(), 3: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert fleet.said(NodeBack) == ["csd0"]


def test_rank_0_is_started_again_and_the_others_wait_for_it(fleet: Fleet) -> None:
    fleet.reachable = {0}
    fleet.stories = {1: lambda fleet: fleet.rank(0).end(), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * 2
    assert fleet.said(NodeBack) == ["host"]


def test_rank_that_is_back_while_others_are_waited_for_is_not_asked_and_stays(fleet: Fleet) -> None:
    def lose_two(fleet: Fleet) -> None:
        fleet.rank(1).is_deaf = True  # so that regrouping takes a while
        fleet.rank(0).end()

    fleet.reachable = {0}
    fleet.stories = {1: lose_two, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert fleet.said(NodeBack) == ["host"]
    assert sorted(fleet.said(NodeLost)) == ["csd0", "host"]


def test_rank_0_that_cannot_be_started_again_ends_the_run(fleet: Fleet) -> None:
    fleet.waits = Waits(start_s=0.3)
    fleet.stories[1] = lambda fleet: fleet.rank(0).end()
    error = error_of(fleet)
    assert (error.node, error.message) == ("host", "rank 0 was killed by signal 15")


@pytest.fixture
def awaiting_host(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the others have been asked, and only rank 0 is waited for."""
    is_waiting, wait = threading.Event(), supervise.Supervisor._await_host

    def say_and_wait(supervision: supervise.Supervisor) -> None:
        is_waiting.set()
        wait(supervision)
        is_waiting.clear()

    monkeypatch.setattr(supervise.Supervisor, "_await_host", say_and_wait)
    return is_waiting


@pytest.mark.parametrize("leave", [ScriptedRank.end, lambda rank: rank.fail("disk full")])
def test_node_lost_while_rank_0_starts_again_is_left_out(
    fleet: Fleet, awaiting_host: threading.Event, leave: Callable[[ScriptedRank], None]
) -> None:
    def begin(rank: ScriptedRank) -> None:
        if len(fleet.processes) > 3:
            leave(fleet.rank(1))
        rank.be_ready()

    fleet.begin = begin
    fleet.reachable = {0}
    fleet.may_return = lambda rank: awaiting_host.is_set()
    fleet.stories = {1: lambda fleet: fleet.rank(0).end(), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert fleet.said(NodeLost) == ["host", "csd0"]


def test_too_few_nodes_after_rank_0_started_again_end_the_run(
    fleet: Fleet, awaiting_host: threading.Event
) -> None:
    def begin(rank: ScriptedRank) -> None:
        if len(fleet.processes) > 3:
            fleet.rank(1).end()
        rank.be_ready()

    fleet.begin = begin
    fleet.min_nodes = 2
    fleet.reachable = {0}
    fleet.may_return = lambda rank: awaiting_host.is_set()
    fleet.stories[1] = lambda fleet: fleet.rank(0).end()
    assert "1 nodes are left" in error_of(fleet).message


def test_host_that_mpirun_blames_again_and_again_is_started_again(fleet: Fleet) -> None:
    blame = "prterun noticed that process rank 0 with PID 7 on node host exited on signal 9 (Killed)."
    fleet.mpirun = {number: shell(f"echo '{blame}' >&2; exit 1") for number in (1, 2, 3)}
    fleet.reachable = {0}
    fleet.stories[4] = Fleet.finish
    fleet.run()
    assert fleet.groups == [(0, 1, 2)] * 4
    assert fleet.said(NodeBack) == ["host"]


def test_too_few_nodes_without_the_one_that_mpirun_blames_end_the_run(fleet: Fleet) -> None:
    blame = "prterun noticed that process rank 1 with PID 7 on node csd0 exited on signal 9 (Killed)."
    fleet.mpirun = {number: shell(f"echo '{blame}' >&2; exit 1") for number in (1, 2, 3)}
    fleet.min_nodes = 2
    assert "1 nodes are left" in error_of(fleet).message


def test_rank_0_may_come_back_as_often_as_a_node(fleet: Fleet, awaiting_host: threading.Event) -> None:
    def lose_host(fleet: Fleet) -> None:
        fleet.rank(1).step()
        fleet.rank(0).end()

    fleet.reachable = {0}
    fleet.may_return = lambda rank: awaiting_host.is_set()
    fleet.stories = dict.fromkeys(range(1, supervise.MAX_RETURNS + 1), lose_host)
    fleet.stories[supervise.MAX_RETURNS + 1] = Fleet.finish
    fleet.run()
    assert fleet.said(NodeBack) == ["host"] * supervise.MAX_RETURNS


def test_rank_0_lost_more_often_than_that_ends_the_run_at_once(fleet: Fleet) -> None:
    def lose_host(fleet: Fleet) -> None:
        fleet.rank(1).step()
        fleet.rank(0).end()

    fleet.reachable = {0}
    fleet.stories = dict.fromkeys(range(1, supervise.MAX_RETURNS + 2), lose_host)
    assert error_of(fleet).node == "host"
    assert len(fleet.said(NodeLost)) == supervise.MAX_RETURNS + 1


# A rank gives up by itself.


def test_others_go_on_without_a_rank_that_gives_up(fleet: Fleet) -> None:
    fleet.stories = {1: lambda fleet: fleet.rank(1).fail("disk full"), 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert fleet.said(NodeLost) == ["csd0"]


def test_node_that_gives_up_is_lost_for_the_reason_it_gives(fleet: Fleet) -> None:
    fleet.min_nodes = 2
    fleet.stories[1] = lambda fleet: fleet.rank(1).fail("disk full", remedy="make room")
    error = error_of(fleet)
    assert "csd0: disk full" in error.message
    assert "make room" in error.message
    assert len(lost_messages(fleet)) == 1


def test_two_nodes_that_give_up_at_once_are_lost_for_their_own_reasons(fleet: Fleet) -> None:
    def give_up(fleet: Fleet) -> None:
        fleet.rank(1).fail("disk full")
        fleet.rank(2).fail("no memory")

    fleet.stories = {1: give_up, 2: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0,)]
    assert [message.split(": ")[1] for message in lost_messages(fleet)] == ["disk full", "no memory"]


def test_what_rank_0_finds_too_ends_the_run(fleet: Fleet) -> None:
    def diverge(fleet: Fleet) -> None:
        fleet.rank(1).fail("the loss became nan (csd0)")
        fleet.rank(0).fail("the loss became nan", remedy="lower it")

    fleet.stories[1] = diverge
    error = error_of(fleet)
    assert (error.node, error.message, error.remedy) == ("host", "the loss became nan", "lower it")
    assert not fleet.said(NodeLost)


@pytest.mark.parametrize("exit_code", [1, 2])
def test_node_that_fails_when_it_is_started_again_stays_away(fleet: Fleet, exit_code: int) -> None:
    def begin(rank: ScriptedRank) -> None:
        if len(fleet.processes) == 4:
            fleet.reachable = set()
            rank.fail("the shard is gone", exit_code=exit_code)
        else:
            rank.be_ready()

    def finish_without_it(event: Event) -> None:
        if isinstance(event, NodeLost) and len(fleet.processes) == 4:
            fleet.finish()

    fleet.begin, fleet.on_event = begin, finish_without_it
    fleet.reachable = {1}
    fleet.stories[1] = lambda fleet: fleet.rank(1).end()
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 2)]
    assert "the shard is gone" in lost_messages(fleet)[1]


def test_nothing_is_missed_while_a_failure_is_looked_into(fleet: Fleet) -> None:
    def be_ready_after_a_failure(event: Event) -> None:
        if isinstance(event, Progress):
            fleet.rank(1).fail("disk full")
            fleet.rank(2).be_ready()

    fleet.begin = lambda rank: rank.step() if len(fleet.processes) == 4 else rank.be_ready()
    fleet.on_event = be_ready_after_a_failure
    fleet.reachable = {2}
    fleet.stories = {1: lambda fleet: fleet.rank(2).end(), 4: Fleet.finish}
    fleet.run()
    assert fleet.groups == [(0, 1, 2), (0, 1), (0,), (0, 2)]
    assert fleet.said(NodeBack) == ["csd1"]


def test_input_that_a_node_cannot_use_ends_the_run(fleet: Fleet) -> None:
    fleet.stories[1] = lambda fleet: fleet.rank(1).fail("no such metric", exit_code=2)
    assert error_of(fleet, InputError).node == "csd0"
    assert fleet.said(Failed) == ["csd0"]


# Ctrl-C.


def test_first_interrupt_lets_the_ranks_finish_their_step(fleet: Fleet) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, Progress):
            press_ctrl_c()

    def finish_when_told(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Stop):
            fleet.finish()

    fleet.on_event, fleet.on_order = interrupt, finish_when_told
    fleet.stories[1] = lambda fleet: fleet.rank(0).step()
    supervision = fleet.supervise()
    supervision.run()
    assert supervision.is_stopping
    assert len(orders_of(fleet.rank(0), Stop)) == 1
    assert not orders_of(fleet.rank(1), Stop)


def test_second_interrupt_ends_everything(fleet: Fleet) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, Progress):
            press_ctrl_c()

    def step_twice(fleet: Fleet) -> None:
        fleet.rank(0).step()
        fleet.rank(0).step()

    fleet.on_event = interrupt
    fleet.stories[1] = step_twice
    with pytest.raises(KeyboardInterrupt):
        fleet.run()
    assert len(orders_of(fleet.rank(0), Stop)) == 1


def test_interrupt_before_the_first_step_ends_everything(fleet: Fleet) -> None:
    fleet.on_event = lambda event: press_ctrl_c() if isinstance(event, Ready) else None
    with pytest.raises(KeyboardInterrupt):
        fleet.run()
    assert not fleet.groups


def test_interrupt_while_regrouping_ends_everything(fleet: Fleet) -> None:
    def interrupt(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Ping):
            press_ctrl_c()

    fleet.on_order = interrupt
    fleet.stories[1] = lambda fleet: fleet.rank(1).end()
    with pytest.raises(KeyboardInterrupt):
        fleet.run()
    assert not orders_of(fleet.rank(0), Stop)


def test_rank_0_that_is_started_again_is_told_again_to_stop(fleet: Fleet) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, Progress):
            press_ctrl_c()

    def die_when_told(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Stop) and rank is fleet.processes[0]:
            rank.end()

    def stop(fleet: Fleet) -> None:
        assert fleet.rank(0).is_stopping
        fleet.finish()

    fleet.on_event, fleet.on_order = interrupt, die_when_told
    fleet.reachable = {0}
    fleet.stories = {1: lambda fleet: fleet.rank(0).step(), 2: stop}
    fleet.run()
    assert fleet.said(NodeBack) == ["host"]


def test_interrupt_while_a_group_makes_room_for_a_node_ends_everything(fleet: Fleet) -> None:
    def interrupt(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, FormGroup) and order.generation == 3 and rank.rank == 0:
            press_ctrl_c()

    fleet.on_order = interrupt
    fleet.reachable = {1}
    fleet.stories[1] = lambda fleet: fleet.rank(1).end()
    with pytest.raises(KeyboardInterrupt):
        fleet.run()


def test_interrupt_while_mpirun_is_being_ended_leaves_no_mpirun(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = links.Links.end

    def end_interrupted(self: links.Links) -> None:
        monkeypatch.setattr(links.Links, "end", end)
        press_ctrl_c()

    monkeypatch.setattr(links.Links, "end", end_interrupted)
    fleet.stories[1] = lambda fleet: fleet.rank(1).end()
    with pytest.raises(KeyboardInterrupt):
        fleet.run()


@pytest.mark.parametrize("kind", [Joined, Finished, LinkLost])
def test_interrupt_while_an_event_is_shown_does_not_lose_the_event(fleet: Fleet, kind: type[Event]) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, kind) and fleet.said(Progress):
            fleet.on_event = lambda event: None
            press_ctrl_c()

    def break_after_a_step(fleet: Fleet) -> None:
        fleet.rank(0).step()
        fleet.rank(0).lose_link(1)

    fleet.on_event = interrupt
    fleet.stories = {1: break_after_a_step, 2: Fleet.finish}
    supervision = fleet.supervise()
    supervision.run()
    assert supervision.is_stopping
    assert fleet.said(kind).count("host") == (2 if kind is Joined else 1)
