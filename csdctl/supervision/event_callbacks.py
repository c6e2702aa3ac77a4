"""Functions of the user that are called with the events of a run, on the host.

Each has its thread and bounded queue: a slow function misses events, a failing one is reported
once, and one that hangs is left behind at the end of the run. Their messages wait until the thread that
supervises the run shows them.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from csdctl.notify import Say, shorten
from csdctl.runs.directory import FREQUENT
from csdctl.worker.protocol.events import Event, event_document

MAX_WAITING = 1024
"""Events that may wait for a function. Half of the places are for events other than FREQUENT ones."""
END_WAIT_S = 10.0
"""Maximum time that functions may still run after the run has ended."""
MAX_ERROR_CHARS = 500


class _Stop:
    def __repr__(self) -> str:
        return "csdctl.STOP"


STOP: Final = _Stop()
"""Returned by a callback: end the run in order, as the first Ctrl-C does. Model and state are saved."""

Callback = Callable[[dict[str, Any]], object]
"""Gets one event as a dict: `event` (its type), `run`, `time` (Unix), and the fields of its type."""


class EventCallbacks(AbstractContextManager["EventCallbacks"]):
    """Passes the events of one run to `functions`, by name. A context manager."""

    def __init__(
        self, functions: Sequence[Callback], run_id: str, say: Say, end_wait_s: float = END_WAIT_S
    ) -> None:
        self._say = say
        self._end_wait_s = end_wait_s
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._callbacks = [_EventCallback(function, run_id, self._messages.put) for function in functions]

    @property
    def has_stopped(self) -> bool:
        """Whether one of them has returned STOP."""
        return any(callback.has_stopped for callback in self._callbacks)

    def put(self, time_s: float, event: Event) -> None:
        """Pass on an event. `time_s` is Unix time. Returns at once."""
        for callback in self._callbacks:
            callback.put(time_s, event)
        self._show_messages()

    def __exit__(self, *_: object) -> None:
        """Wait until the functions have had all events, for `end_wait_s` at most."""
        deadline = time.monotonic() + self._end_wait_s
        for callback in self._callbacks:
            callback.events.put(None)
        for callback in self._callbacks:
            callback.join(max(0.0, deadline - time.monotonic()), self._end_wait_s)
        self._show_messages()

    def _show_messages(self) -> None:
        while not self._messages.empty():
            self._say(self._messages.get())


class _EventCallback:
    def __init__(self, function: Callback, run_id: str, say: Say) -> None:
        self._function, self._run_id, self._say = function, run_id, say
        self._name = f"callback {name_of(function)}"
        self.events: queue.SimpleQueue[tuple[float, Event] | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._num_dropped = self._num_failed = 0
        self._current = ""
        self.has_stopped = False
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def put(self, time_s: float, event: Event) -> None:
        limit = MAX_WAITING // 2 if isinstance(event, FREQUENT) else MAX_WAITING
        if self.events.qsize() < limit:
            self.events.put((time_s, event))
        else:
            self._num_dropped += 1

    def join(self, timeout_s: float, allowed_s: float) -> None:
        self._thread.join(timeout_s)
        self._is_over.set()
        if self._thread.is_alive():
            unread = f" and {waiting} more events" if (waiting := self.events.qsize() - 1) > 0 else ""
            self._say(
                f"{self._name} did not finish {self._current}{unread} within {allowed_s:g} s of the end of "
                "the run; csdctl no longer waits for it"
            )
        if self._num_failed > 1:
            self._say(f"{self._name} failed at {self._num_failed:,} events")
        if self._num_dropped:
            self._say(f"{self._name} is slower than the run and missed {self._num_dropped:,} events")

    def _run(self) -> None:
        while (item := self.events.get()) is not None and not self._is_over.is_set():
            time_s, event = item
            self._current = type(event).__name__
            document = {"run": self._run_id, "time": round(time_s, 4), **event_document(event)}
            try:
                answer = self._function(document)
            except BaseException as error:  # such as SystemExit: only this thread would end, without a word
                self._num_failed += 1
                if self._num_failed == 1:
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    what = shorten(f"{type(error).__name__}: {error}", MAX_ERROR_CHARS)
                    where = f"{Path(frame.filename).name}, line {frame.lineno}"
                    where = f"{self._current}, and the run continues: {what} ({where})"
                    self._say(f"{self._name} failed at {where}")
                continue
            if answer is STOP and not self.has_stopped:
                self._say(f"{self._name} stops the run at {self._current}")
                self.has_stopped = True


def name_of(function: Callback) -> str:
    """Return the name of a function for messages."""
    return str(getattr(function, "__name__", type(function).__name__))
