"""Callbacks over events: whatever the user's function does, the run is not delayed and not broken."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from csdctl.supervision.event_callbacks import MAX_WAITING, STOP, EventCallbacks
from csdctl.worker.protocol.events import EpochEnd, Event, Progress, event_document

STEP = Progress(0, "host", 1, 1, 1, 8, 0.1, 0.1, 0.2, metrics={"accuracy": 0.5})
EPOCH = EpochEnd(0, "host", 1, 10, 80, 1.0, 0.1, 1.1, "hash", loss=0.5)


class Run:
    """A run that sends events to callbacks; `said` has the messages."""

    def __init__(self, *functions: Callable[[dict[str, Any]], object], end_wait_s: float = 3600.0) -> None:
        self.said: list[str] = []
        self.callbacks = EventCallbacks(functions, "20261122-100000", self.said.append, end_wait_s)

    def send(self, *events: Event) -> None:
        with self.callbacks:
            for event in events:
                self.callbacks.put(1790.12341, event)


def test_function_gets_every_event_in_order_as_documented_and_cannot_change_what_others_see() -> None:
    received: list[dict[str, Any]] = []

    def clear(event: dict[str, Any]) -> None:
        event["metrics"].clear()
        event.clear()

    run = Run(clear, received.append)
    run.send(STEP, EPOCH, STEP)
    head = {"run": "20261122-100000", "time": 1790.1234}
    assert received == [{**head, **event_document(event)} for event in (STEP, EPOCH, STEP)]
    assert received[2]["metrics"] == STEP.metrics == {"accuracy": 0.5}
    assert run.said == []


@pytest.mark.parametrize("error", [ValueError("no such column"), SystemExit("goodbye")])
def test_failing_function_is_reported_once_and_gets_the_next_events(error: BaseException) -> None:
    received = []

    def fail(event: dict[str, Any]) -> None:
        received.append(event)
        raise error

    run = Run(fail)
    run.send(EPOCH, STEP, STEP)
    assert len(received) == 3
    first, last = run.said
    assert re.fullmatch(
        rf"callback fail failed at EpochEnd, and the run continues: {type(error).__name__}: {error} "
        r"\(test_event_callbacks.py, line \d+\)",
        first,
    )
    assert last == "callback fail failed at 3 events"


def test_slow_function_misses_steps_and_keeps_the_rest() -> None:
    may_go_on, received = threading.Event(), []

    def wait(event: dict[str, Any]) -> None:
        may_go_on.wait()
        received.append(event["event"])

    run = Run(wait)
    with run.callbacks:
        for _ in range(2 * MAX_WAITING):
            run.callbacks.put(0.0, STEP)
        for _ in range(MAX_WAITING // 4):
            run.callbacks.put(0.0, EPOCH)
        may_go_on.set()
    assert received.count("EpochEnd") == MAX_WAITING // 4
    missed = 2 * MAX_WAITING - received.count("Progress")
    assert 0 < missed <= 2 * MAX_WAITING - MAX_WAITING // 2
    assert run.said == [f"callback wait is slower than the run and missed {missed:,} events"]


def test_function_that_hangs_is_left_behind() -> None:
    may_end, began = threading.Event(), threading.Event()
    received = []

    def hang(event: dict[str, Any]) -> None:
        received.append(event)
        began.set()
        may_end.wait()

    run = Run(hang, end_wait_s=0.05)
    with run.callbacks:  # which ends although the function does not
        run.callbacks.put(0.0, EPOCH)
        began.wait()
        run.callbacks.put(0.0, STEP)
    assert run.said == [
        "callback hang did not finish EpochEnd and 1 more events within 0.05 s of the end of the run; "
        "csdctl no longer waits for it"
    ]
    [thread] = [one for one in threading.enumerate() if one.name == "callback hang"]
    assert thread.daemon
    may_end.set()
    thread.join()
    assert len(received) == 1  # it gets nothing more, once the run is over


def test_stop_is_asked_for_once() -> None:
    run = Run(lambda event: STOP)
    assert not run.callbacks.has_stopped
    run.send(STEP, EPOCH)
    assert run.callbacks.has_stopped
    assert run.said == ["callback <lambda> stops the run at Progress"]
