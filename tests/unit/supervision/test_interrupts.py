"""Ctrl-C: the first one lets the ranks finish their step, the second one ends everything.

A callback can ask for the same end as the first one.
"""

import pytest

from csdctl.launch.mpi_job import JobOutcome
from csdctl.supervision.run_setup import Links
from csdctl.supervision.supervisor import CALLBACK, USER
from csdctl.worker.protocol.events import Event, Finished, Joined, LinkLost, NodeBack, Progress, Ready
from csdctl.worker.protocol.orders import Order, Ping, Stop
from tests.unit.supervision.scripted_ranks import Fleet, ScriptedRank, orders_of, press_ctrl_c


def interrupt_at_a_step(event: Event) -> None:
    if isinstance(event, Progress):
        press_ctrl_c()


@pytest.mark.parametrize("stopped_by", [USER, CALLBACK])
def test_first_interrupt_or_a_callback_lets_the_ranks_finish_their_step(
    fleet: Fleet, stopped_by: str
) -> None:
    def finish_when_told(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Stop):
            fleet.finish()

    if stopped_by == CALLBACK:
        fleet.should_stop = True  # from the beginning: long before there is a step to finish
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
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    with pytest.raises(KeyboardInterrupt):
        fleet.run()
    assert not orders_of(fleet.rank(0), Stop)


def test_restarted_rank_0_receives_stop_again(fleet: Fleet) -> None:
    def exit_when_told(rank: ScriptedRank, order: Order) -> None:
        if isinstance(order, Stop) and rank is fleet.processes[0]:
            rank.exit()

    def stop(fleet: Fleet) -> None:
        assert fleet.rank(0).is_stopping
        fleet.finish()

    fleet.on_event, fleet.on_order = interrupt_at_a_step, exit_when_told
    fleet.reachable = {0}
    fleet.scripts = {1: lambda fleet: fleet.rank(0).step(), 2: stop}
    fleet.run()
    assert fleet.nodes_of(NodeBack) == ["host"]


class InterruptedLinks(Links):
    """Links with an interrupt at the first attempt to end them."""

    is_interrupted = False

    def end(self) -> JobOutcome | None:
        if not self.is_interrupted:
            self.is_interrupted = True
            press_ctrl_c()
        return super().end()


def test_interrupt_while_mpirun_is_being_ended_leaves_no_mpirun(fleet: Fleet) -> None:
    fleet.links_type = InterruptedLinks
    fleet.scripts[1] = lambda fleet: fleet.rank(1).exit()
    with pytest.raises(KeyboardInterrupt):
        fleet.run()


@pytest.mark.parametrize("event_type", [Joined, Finished, LinkLost])
def test_interrupt_while_an_event_is_recorded_does_not_lose_the_event(
    fleet: Fleet, event_type: type[Event]
) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, event_type) and fleet.nodes_of(Progress):
            fleet.on_event = lambda event: None
            press_ctrl_c()

    def break_after_a_step(fleet: Fleet) -> None:
        fleet.rank(0).step()
        fleet.rank(0).lose_link(1)

    fleet.on_event = interrupt
    fleet.scripts = {1: break_after_a_step, 2: Fleet.finish}
    supervisor = fleet.supervise()
    supervisor.run()
    assert supervisor.stopped_by == USER
    assert fleet.nodes_of(event_type).count("host") == (2 if event_type is Joined else 1)
