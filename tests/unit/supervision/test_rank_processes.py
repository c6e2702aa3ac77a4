"""Which messages arrive when a rank's process is dropped and another process takes its place."""

import threading
from collections.abc import Callable, Iterator

import pytest

from csdctl.errors import NodeError, UnreachableError
from csdctl.supervision.rank_processes import MAX_WAITING, OnMessage, ProcessEnded, RankProcesses, Restarted
from csdctl.worker.protocol.events import Pong
from csdctl.worker.protocol.orders import Order
from tests import patience
from tests.patience import eventually, scaled

WAIT_S = scaled(patience.WAIT_S)
"""Only a test that fails waits this long."""


class FakeProcess:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.orders: list[Order] = []
        self.closed = threading.Event()

    def listen(self, on_message: OnMessage) -> None:
        self._on_message = on_message

    def send(self, order: Order) -> None:
        self.orders.append(order)

    def close(self) -> None:
        self.closed.set()

    def answer(self, number: int) -> None:
        self._on_message(Pong(self.rank, "csd0", number))

    def exit(self) -> None:
        self._on_message(ProcessEnded(self.rank, "csd0", NodeError("gone", node="csd0")))


class Machine:
    """Starts processes: raises `failures` first, then calls `on_start` with each process."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.on_start: Callable[[FakeProcess], None] = lambda process: None
        self.failures: list[Exception] = []

    def start(self, rank: int) -> FakeProcess:
        if self.failures:
            raise self.failures.pop(0)
        self.started.append(FakeProcess(rank))
        self.on_start(self.started[-1])
        return self.started[-1]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def processes(machine: Machine) -> Iterator[RankProcesses]:
    processes = RankProcesses(machine.start, machine.start, 0.01, lambda message: None)
    yield processes
    processes.close()
    assert all(process.closed.is_set() for process in machine.started)


def test_process_waits_while_too_many_of_its_messages_are_not_handled(
    processes: RankProcesses, machine: Machine
) -> None:
    processes.start(1)
    answered: list[int] = []

    def answer() -> None:
        for number in range(MAX_WAITING + 2):
            machine.started[0].answer(number)
            answered.append(number)

    reader = threading.Thread(target=answer, daemon=True)
    reader.start()
    assert eventually(lambda: len(answered) == MAX_WAITING)
    reader.join(0.1)
    assert reader.is_alive()
    assert processes.receive(0.0) == Pong(1, "csd0", 0)
    assert eventually(lambda: len(answered) == MAX_WAITING + 1)
    processes.drop(1)  # nobody will handle the rest
    reader.join()


def test_no_message_of_a_dropped_process_arrives(processes: RankProcesses, machine: Machine) -> None:
    processes.start(1)
    machine.started[0].answer(1)
    processes.drop(1)
    machine.started[0].exit()
    assert [processes.receive(0.0), processes.receive(0.0)] == [None, None]


def test_late_end_of_a_dropped_process_does_not_end_the_restarted_process(
    processes: RankProcesses, machine: Machine
) -> None:
    processes.start(1)
    processes.drop(1)
    processes.restart(1)
    assert processes.receive(WAIT_S) == Restarted(1)
    machine.started[0].exit()
    assert processes.receive(0.0) is None
    assert processes.ranks == {1}


@pytest.mark.parametrize("failure", [UnreachableError("down"), OSError("broken pipe"), ValueError("?")])
def test_restart_that_fails_is_retried(
    processes: RankProcesses, machine: Machine, failure: Exception
) -> None:
    machine.failures = [failure] * 2
    processes.restart(1)
    assert processes.receive(WAIT_S) == Restarted(1)
    assert not machine.failures


def test_process_that_starts_after_the_run_is_over_is_closed(
    processes: RankProcesses, machine: Machine
) -> None:
    is_starting, may_start = threading.Event(), threading.Event()

    def start_slowly(process: FakeProcess) -> None:
        is_starting.set()
        may_start.wait()

    machine.on_start = start_slowly
    processes.restart(1)
    assert is_starting.wait(WAIT_S)
    processes.close()
    may_start.set()
    assert machine.started[0].closed.wait(WAIT_S)


def test_restarted_process_that_was_never_received_is_closed(
    processes: RankProcesses, machine: Machine
) -> None:
    processes.restart(1)
    for thread in threading.enumerate():
        if thread.name == "restart rank 1":
            thread.join()
    processes.close()
    assert machine.started[0].closed.is_set()
