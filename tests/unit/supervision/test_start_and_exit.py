"""How a run starts and ends, also by Ctrl-C, and ranks and links that fail before it trains."""

import threading
from collections.abc import Callable

import pytest

from csdctl.errors import CsdctlError, DeadlineError, ExitCode, InputError, NodeError, RunError
from csdctl.supervision.supervisor import CALLBACK, USER
from csdctl.worker.protocol.events import Event, Finished, Joined, NodeBack, NodeLost, Progress, Ready, Warned
from csdctl.worker.protocol.orders import Begin, OpenHub, Order, Stop
from tests.patience import scaled
from tests.unit.supervision.scripted_ranks import (
    Fleet,
    ScriptedRank,
    is_told_to_stop,
    orders_of,
    press_ctrl_c,
)


@pytest.mark.parametrize(("absent", "group"), [((), (0, 1, 2)), ((1,), (0, 2)), ((1, 2), (0,))])
def test_run_is_complete_when_all_ranks_but_absent_ones_have_reported_completion(
    fleet: Fleet, absent: tuple[int, ...], group: tuple[int, ...]
) -> None:
    fleet.absent = absent
    fleet.scripts[1] = Fleet.finish
    fleet.run()
    assert fleet.groups == [group]
    assert [link.rank for link in fleet.links] == [*group][1:]
    assert orders_of(fleet.rank(0), Begin) == [Begin(group)]
    assert not fleet.nodes_of(NodeLost)


def test_ranks_with_others_behind_them_are_told_to_open_a_hub(fleet: Fleet) -> None:
    fleet.servers = (0, 1, 1)
    fleet.scripts[1] = Fleet.finish
    fleet.run()
    assert [bool(orders_of(fleet.rank(rank), OpenHub)) for rank in range(3)] == [True, True, False]


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
        for number in sorted(fleet.members, reverse=True):
            rank = fleet.rank(number)
            rank.finish()
            end(rank) if rank.rank else rank.exit(is_clean=True)

    fleet.scripts[1] = finish
    fleet.run()
    warnings = {event.node: event.message for event in fleet.events if isinstance(event, Warned)}
    suffix = ", after the rank had finished"
    assert warnings == {node: problem + suffix for node, problem in problems.items()}


def test_ranks_that_do_not_start_in_time_are_named(fleet: Fleet) -> None:
    fleet.set_patience(start_s=0.1)
    fleet.on_start = lambda rank: rank.report_ready() if rank.rank == 0 else None
    error = fleet.run_to_error(DeadlineError)
    assert error.message == "csd0, csd1 did not start within 0.1 s"
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


def test_rank_that_exits_before_all_take_part_fails_the_run(fleet: Fleet) -> None:
    fleet.on_start = lambda rank: rank.exit("no memory") if rank.rank == 2 else rank.report_ready()
    error = fleet.run_to_error()
    assert (error.node, error.message) == ("csd1", "no memory")


@pytest.mark.parametrize("is_hung", [False, True])
def test_link_that_never_connects_fails_the_run_and_is_named(fleet: Fleet, is_hung: bool) -> None:
    fleet.never_connect = {2}
    fleet.set_patience(link_s=scaled(0.1) if is_hung else 3600.0)
    if not is_hung:
        fleet.on_order = lambda rank, order: isinstance(order, Begin) and break_at_once(fleet)

    def break_at_once(fleet: Fleet) -> None:
        fleet.link(2).lines = ["Daemon exit status: 7: no route"]
        fleet.link(2).has_ended = True

    error = fleet.run_to_error()
    assert error.node == "csd1"
    assert "its link did not connect: " in error.message
    assert is_hung or error.message.endswith("exited with 7: no route")


def test_node_without_an_address_fails_the_run_and_is_named(fleet: Fleet) -> None:
    def start_link(rank: int) -> None:
        raise NodeError("it has no address in 10.0.0.0/24", node=fleet.nodes[rank])

    fleet._start_link = start_link  # type: ignore[method-assign]
    assert "it has no address" in fleet.run_to_error().message


def test_failure_of_rank_0_fails_the_run(fleet: Fleet) -> None:
    fleet.scripts[1] = lambda fleet: fleet.rank(0).fail("the loss became nan", remedy="lower it")
    error = fleet.run_to_error()
    assert (error.node, error.message, error.remedy) == ("host", "the loss became nan", "lower it")
    assert not fleet.nodes_of(NodeLost)


def test_links_that_end_before_the_completion_records_come_are_not_lost(fleet: Fleet) -> None:
    """Rank 0 may save its model for long."""

    def end_links(fleet: Fleet) -> None:
        for rank in (1, 2):
            fleet.link(rank).is_clean = fleet.link(rank).has_ended = True
        fleet.rank(0).step()

    def finish_later(event: Event) -> None:
        if isinstance(event, Progress):
            threading.Timer(0.1, fleet.finish).start()

    fleet.set_patience(cause_s=scaled(30.0))
    fleet.scripts[1], fleet.on_event = end_links, finish_later
    fleet.run()
    assert fleet.nodes_of(NodeLost) == []
    assert len(fleet.links) == 2


def test_node_that_reports_its_completion_early_changes_nothing_for_the_others(fleet: Fleet) -> None:
    """Their losses are still noted, and they are restarted."""

    def finish_early(fleet: Fleet) -> None:
        fleet.rank(1).finish()
        fleet.rank(2).exit()

    fleet.reachable = {2}
    fleet.scripts = {1: finish_early, 3: Fleet.finish}
    fleet.run()
    assert fleet.nodes_of(NodeLost) == fleet.nodes_of(NodeBack) == ["csd1"]


def test_check_goes_on_without_what_does_not_start_or_connect(fleet: Fleet) -> None:
    """Rank 0 begins alone; the run ends when every node has either taken part or been lost."""
    fleet.nodes = ["host", "csd0", "csd1", "csd2", "csd3"]
    fleet.is_check = True
    fleet.set_patience(start_s=scaled(0.1), link_s=scaled(0.1), max_restarts=0)
    fleet.never_connect = {3}

    def start(rank: ScriptedRank) -> None:
        if rank.rank == 2:
            rank.exit("no memory")
        elif rank.rank != 4:
            rank.report_ready()

    def is_over() -> bool:
        return {1, *map(fleet.nodes.index, fleet.nodes_of(NodeLost))} >= {1, 2, 3, 4} and 1 in fleet.members

    fleet.on_start, fleet.should_stop = start, is_over
    fleet.on_order = lambda rank, order: fleet.finish() if isinstance(order, Stop) else None
    fleet.run()
    assert orders_of(fleet.rank(0), Begin) == [Begin((0,))]
    assert is_told_to_stop(fleet)
    told = dict(zip(fleet.nodes_of(NodeLost), fleet.lost_messages(), strict=True))
    assert set(told) == {"csd1", "csd2", "csd3"}
    assert (told["csd1"], "did not connect" in told["csd2"]) == ("no memory", True)
    assert "did not start within" in told["csd3"]
    assert len(fleet.processes) == 5, "nothing is restarted"


def interrupt_at_a_step(event: Event) -> None:
    if isinstance(event, Progress):
        press_ctrl_c()


def finish_when_told(rank: ScriptedRank, order: Order) -> None:
    if isinstance(order, Stop):
        rank.fleet.finish()


@pytest.mark.parametrize("stopped_by", [USER, CALLBACK])
def test_first_interrupt_or_a_callback_lets_the_ranks_finish_their_step(
    fleet: Fleet, stopped_by: str
) -> None:
    if stopped_by == CALLBACK:
        fleet.should_stop = lambda: True  # from the beginning: long before there is a step to finish
    else:
        fleet.on_event = interrupt_at_a_step
    fleet.on_order = finish_when_told
    fleet.scripts[1] = lambda fleet: fleet.rank(0).step()
    supervisor = fleet.supervise()
    supervisor.run()
    assert supervisor.stopped_by == stopped_by
    assert len(orders_of(fleet.rank(0), Stop)) == 1
    assert not orders_of(fleet.rank(1), Stop)


def test_second_interrupt_ends_everything(fleet: Fleet) -> None:
    fleet.on_event = interrupt_at_a_step
    fleet.scripts[1] = lambda fleet: [fleet.rank(0).step() for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        fleet.run()
    assert len(orders_of(fleet.rank(0), Stop)) == 1


def test_interrupt_before_all_take_part_ends_everything(fleet: Fleet) -> None:
    fleet.on_event = lambda event: press_ctrl_c() if isinstance(event, Ready) else None
    with pytest.raises(KeyboardInterrupt):
        fleet.run()
    assert not fleet.groups


def test_restarted_rank_0_receives_stop_again(fleet: Fleet) -> None:
    def exit_or_finish_when_told(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Stop):
            rank.exit() if rank is fleet.processes[0] else None

    fleet.on_event, fleet.on_order = interrupt_at_a_step, exit_or_finish_when_told
    fleet.reachable = {0}
    fleet.scripts = {1: lambda fleet: fleet.rank(0).step(), 2: Fleet.finish}
    fleet.run()
    assert fleet.nodes_of(NodeBack) == ["host"]
    assert len(orders_of(fleet.rank(0), Stop)) == 1


@pytest.mark.parametrize("event_type", [Joined, Finished])
def test_interrupt_while_an_event_is_recorded_does_not_lose_the_event(
    fleet: Fleet, event_type: type[Event]
) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, event_type) and fleet.nodes_of(Progress):
            fleet.on_event = lambda event: None
            press_ctrl_c()

    def break_after_a_step(fleet: Fleet) -> None:
        fleet.rank(0).step()
        fleet.leave(1, "its link was lost")

    fleet.on_event = interrupt
    fleet.scripts = {1: break_after_a_step, 2: Fleet.finish}
    supervisor = fleet.supervise()
    supervisor.run()
    assert supervisor.stopped_by == USER
    assert fleet.nodes_of(event_type).count("host") == (2 if event_type is Joined else 1)
