"""Whose words are heard when a rank's process is given up and another one takes its place."""

import threading
from collections.abc import Callable, Iterator

import pytest

from csdctl.errors import NodeError, UnreachableError
from csdctl.launch import rank_processes
from csdctl.launch.rank_process import ProcessEnded, RankMessage
from csdctl.launch.rank_processes import RankProcesses, Restarted
from csdctl.worker.protocol.events import Pong
from csdctl.worker.protocol.orders import Order, Ping

WAIT_S = 5.0
"""Nothing here takes so long; a test that fails does."""


class Process:
    def __init__(self, rank: int, hear: Callable[[RankMessage], None]) -> None:
        self.rank, self.hear = rank, hear
        self.orders: list[Order] = []
        self.closed = threading.Event()

    def order(self, order: Order) -> None:
        self.orders.append(order)

    def close(self) -> None:
        self.closed.set()

    def answer(self, number: int) -> None:
        self.hear(Pong(self.rank, "csd0", number))

    def end(self) -> None:
        self.hear(ProcessEnded(self.rank, "csd0", NodeError("gone", node="csd0")))


class Machine:
    """Where processes are started; `begin` and `fail` are what comes of it."""

    def __init__(self) -> None:
        self.begun: list[Process] = []
        self.begin: Callable[[Process], None] = lambda process: None
        self.failures: list[Exception] = []

    def start(self, rank: int, hear: Callable[[RankMessage], None]) -> Process:
        if self.failures:
            raise self.failures.pop(0)
        self.begun.append(Process(rank, hear))
        self.begin(self.begun[-1])
        return self.begun[-1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(rank_processes, "RETURN_INTERVAL_S", 0.01)
    return Machine()


@pytest.fixture
def processes(machine: Machine) -> Iterator[RankProcesses]:
    processes = RankProcesses(machine.start, machine.start)
    yield processes
    processes.close()
    assert all(process.closed.is_set() for process in machine.begun)


def test_what_a_process_says_is_heard_in_order(processes: RankProcesses, machine: Machine) -> None:
    processes.start(1)
    machine.begun[0].answer(1)
    machine.begun[0].answer(2)
    assert [processes.next(0.0), processes.next(0.0)] == [Pong(1, "csd0", 1), Pong(1, "csd0", 2)]
    assert processes.next(0.0) is None


def test_order_to_a_rank_without_a_process_goes_nowhere(processes: RankProcesses, machine: Machine) -> None:
    processes.start(1)
    processes.order(1, Ping(7))
    processes.order(2, Ping(7))
    assert machine.begun[0].orders == [Ping(7)]


def test_nothing_is_heard_of_a_process_that_was_given_up(processes: RankProcesses, machine: Machine) -> None:
    processes.start(1)
    machine.begun[0].answer(1)
    processes.give_up(1)
    machine.begun[0].end()
    assert [processes.next(0.0), processes.next(0.0)] == [None, None]


def test_late_end_of_an_earlier_process_is_not_that_of_the_new_one(
    processes: RankProcesses, machine: Machine
) -> None:
    processes.start(1)
    processes.give_up(1)
    processes.bring_back(1)
    assert processes.next(WAIT_S) == Restarted(1)
    machine.begun[0].end()
    assert processes.next(0.0) is None
    assert processes.ranks == {1}


def test_process_that_ends_while_it_is_being_started_is_known_first(
    processes: RankProcesses, machine: Machine
) -> None:
    machine.begin = Process.end
    processes.bring_back(1)
    assert processes.next(WAIT_S) == Restarted(1)
    assert isinstance(processes.next(WAIT_S), ProcessEnded)


@pytest.mark.parametrize("failure", [UnreachableError("down"), OSError("broken pipe"), ValueError("?")])
def test_start_that_fails_is_tried_again(
    processes: RankProcesses, machine: Machine, failure: Exception
) -> None:
    machine.failures = [failure] * 2
    processes.bring_back(1)
    assert processes.next(WAIT_S) == Restarted(1)
    assert not machine.failures


def test_process_that_is_started_when_all_is_over_is_closed(
    processes: RankProcesses, machine: Machine
) -> None:
    is_starting, may_start = threading.Event(), threading.Event()

    def be_slow(process: Process) -> None:
        is_starting.set()
        may_start.wait(WAIT_S)

    machine.begin = be_slow
    processes.bring_back(1)
    assert is_starting.wait(WAIT_S)
    processes.close()
    may_start.set()
    assert machine.begun[0].closed.wait(WAIT_S)


def test_process_that_nobody_has_taken_in_is_closed(processes: RankProcesses, machine: Machine) -> None:
    processes.bring_back(1)
    for thread in threading.enumerate():
        if thread.name == "bring back rank 1":
            thread.join(WAIT_S)
    processes.close()
    assert machine.begun[0].closed.is_set()
