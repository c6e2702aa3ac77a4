"""Ctrl-C: the first one lets the ranks finish their step, the second one ends everything.

A callback can ask for the same end as the first one.
"""

import pytest

from csdctl.supervision.supervisor import CALLBACK, USER
from csdctl.worker.protocol.events import Event, Finished, Joined, NodeBack, Progress, Ready
from csdctl.worker.protocol.orders import Order, Stop
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedRank, orders_of, press_ctrl_c


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
