"""A rank's process that is dropped and replaced, what each may report."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from csdctl.errors import NodeError, UnreachableError
from csdctl.supervision.rank_processes import (
    CHARS_PER_EVENT,
    EVENTS_PER_S,
    MAX_EVENTS_AT_ONCE,
    MAX_WAITING_AT_ONCE,
    EventValidator,
    OnMessage,
    ProcessEnded,
    RankProcesses,
    Restarted,
)
from csdctl.worker.protocol import events
from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.orders import Order, Ping
from tests import patience
from tests.patience import scaled

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
        self._on_message(events.Pong(self.rank, "csd0", number))

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


def test_no_message_of_a_dropped_process_arrives_or_ends_the_restarted_one(
    processes: RankProcesses, machine: Machine
) -> None:
    processes.start(1)
    machine.started[0].answer(1)
    processes.drop(1)
    machine.started[0].exit()
    assert [processes.receive(0.0), processes.receive(0.0)] == [None, None]
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


def test_rank_that_is_being_restarted_is_started_once(processes: RankProcesses, machine: Machine) -> None:
    may_start = threading.Event()
    machine.on_start = lambda process: may_start.wait()
    processes.restart(1)
    processes.restart(1)
    may_start.set()
    assert processes.receive(WAIT_S) == Restarted(1)
    assert processes.receive(0.1) is None
    assert len(machine.started) == 1
    processes.drop(1)
    processes.restart(1)
    assert processes.receive(WAIT_S) == Restarted(1)


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


NODES = ("host", "csd0", "csd1")
NUM_EPOCHS = 3
ME = (1, "csd0")
READY = events.Ready(*ME, 100)
PROGRESS = events.Progress(*ME, 1, 1, 1, 8, 0.1, 0.1, 0.2)
FINISHED = events.Finished(*ME, 3, 30, "hash", 1)
FAILED = events.Failed(*ME, "disk full")
WAITING = events.WaitingFor(*ME, ("csd1",))
WARNED = events.Warned(*ME, "checkpoints/step-00000072.npz is damaged")


def end_of(epoch: int) -> events.EpochEnd:
    return events.EpochEnd(*ME, epoch, 10, 80, 1.0, 0.1, 1.1, "hash")


def refusal(story: Iterable[events.Event | Order], *, rank: int = 1, num_chars: int = 100) -> str:
    """Return why the last event of a story is refused, '' when it is not; the others must not be."""
    validator, said = EventValidator(rank, NODES, num_epochs=NUM_EPOCHS, has_hub=rank == 0), ""
    for item in story:
        assert not said
        try:
            if isinstance(item, events.Event):
                validator.check(item, num_chars, now=0.0)
            else:
                validator.note_order(item)
        except ProtocolError as error:
            said = str(error)
    return said


@pytest.mark.parametrize(
    "story",
    [
        [READY, PROGRESS, end_of(1), end_of(2), end_of(3), FINISHED],
        [READY, end_of(3), FINISHED, Ping(1), events.Pong(*ME, 1)],
        [READY, WAITING, PROGRESS, WAITING, WAITING],
        [READY, Ping(1), Ping(1), events.Pong(*ME, 1), events.Pong(*ME, 1)],
        [FAILED],
        [WARNED, READY, WARNED, FINISHED, WARNED],
        [READY, FINISHED, FAILED, Ping(1), events.Pong(*ME, 1)],
    ],
)
def test_what_a_worker_sends_is_accepted(story: list[events.Event | Order]) -> None:
    assert refusal(story) == ""


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ([READY, READY], "Ready: expected Ready once"),
        ([PROGRESS], "Progress: expected Ready once, before anything else"),
        ([FINISHED], "Finished: expected Ready once"),
        ([READY, events.Joined(*ME, 1, 0, 10, 0, {"0": 8, "1": 8})], "Joined: expected only from rank 0"),
        ([READY, end_of(1), end_of(1)], "EpochEnd: expected an epoch from 2 to 3"),
        ([READY, end_of(4)], "EpochEnd: expected an epoch from 1 to 3, received 4"),
        ([READY, end_of(2), PROGRESS], "Progress: expected an epoch from 3 to 3, received 1"),
        ([READY, FINISHED, FINISHED], "Finished: expected nothing after Finished"),
        ([FAILED, FAILED], "Failed: expected nothing after Failed"),
        ([FAILED, READY], "Ready: expected nothing after Failed"),
        ([READY, events.Pong(*ME, 1)], "Pong: expected one answer to each ping"),
        (
            [READY, Ping(1), events.Pong(*ME, 1), events.Pong(*ME, 1)],
            "Pong: expected one answer to each ping",
        ),
        ([READY, Ping(1), events.Pong(*ME, 2)], "Pong: expected one answer to each ping"),
        ([replace(READY, rank=2, node="csd1")], "Ready: expected rank 1 on csd0, received rank 2 on 'csd1'"),
        ([replace(READY, node="csd1")], "Ready: expected rank 1 on csd0, received rank 1 on 'csd1'"),
    ],
)
def test_what_no_worker_sends_is_refused(story: list[events.Event | Order], expected: str) -> None:
    assert refusal(story).startswith(expected)


def test_epochs_end_once_more_when_rank_0_goes_back() -> None:
    validator = EventValidator(1, NODES, num_epochs=NUM_EPOCHS)
    for event in (READY, end_of(1)):
        validator.check(event, 100, now=0.0)
    validator.forget_epochs()
    validator.check(end_of(1), 100, now=0.0)


def test_rank_0_is_checked_like_the_others() -> None:
    ready = events.Ready(0, "host", 1)
    assert refusal([ready, ready], rank=0).startswith("Ready: expected Ready once")
    begun = events.Joined(0, "host", 1, 0, 10, 0, {"0": 8, "1": 8})
    assert refusal([ready, begun, events.Traffic(0, "host", ())], rank=0) == ""


def test_rank_may_send_much_at_once_and_then_a_limited_number_per_second() -> None:
    validator = EventValidator(*ME[:1], NODES, num_epochs=1)
    validator.check(READY, CHARS_PER_EVENT, now=-1.0)
    cost = 2
    for _ in range(MAX_EVENTS_AT_ONCE // cost):
        validator.check(PROGRESS, CHARS_PER_EVENT, now=0.0)
    with pytest.raises(ProtocolError, match="at most 100 events of 1000 characters per second"):
        validator.check(PROGRESS, CHARS_PER_EVENT, now=0.0)
    for second in range(2, 10):
        for _ in range(EVENTS_PER_S // cost):
            validator.check(PROGRESS, CHARS_PER_EVENT, now=float(second))


@pytest.mark.parametrize("event", [WAITING, WARNED], ids=lambda event: type(event).__name__)
def test_rank_that_says_all_the_time_that_it_waits_or_warns_is_refused(event: events.Event) -> None:
    story = [READY, *[event] * (MAX_WAITING_AT_ONCE + 1)]
    assert refusal(story) == f"{type(event).__name__}: expected at most 1 per second"
