"""Ends a unit test that waits for what never comes, long before `BACKSTOP_S`.

It takes the place of pytest-timeout's timer, by the hook for that: the timer rings repeatedly, and a test
fails when neither this process nor what it has started has worked for `IDLE_S`, scaled, or at its timeout as
before. Tests that are over when it would ring for the first time cost nothing. No thread is added to the
process, and the signal interrupts whatever the test waits in.

Other tests wait for commands that may be idle for longer; `patience.communicate` and `patience.wait_for` know
more about those.
"""

import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import pytest
import pytest_timeout  # type: ignore[import-untyped]

from tests.patience import IDLE_S, Idleness, scaled

IN_PROCESS = (Path(__file__).parent / "unit",)
"""The directories of the tests that are looked at."""
FIRST_S = 5.0
"""The timer rings for the first time after this time, ..."""
NEXT_S = 2.0
"""... and again this long after each look."""


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Start the timer of a test; None leaves that to pytest-timeout."""
    is_ours = any(item.path.is_relative_to(directory) for directory in IN_PROCESS)
    if not is_ours or threading.current_thread() is not threading.main_thread():
        return None
    watched = WatchedTest(item, settings)
    item.cancel_timeout = watched.cancel  # type: ignore[attr-defined] # what pytest-timeout calls at the end
    watched.start()
    return True


class WatchedTest:
    """One test, from its setup to the end of its teardown."""

    def __init__(self, item: pytest.Item, settings: pytest_timeout.Settings) -> None:
        self._item = item
        self._settings = settings
        self._began_s = time.monotonic()
        self._idleness: Idleness | None = None

    def start(self) -> None:
        """Start the timer."""
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, min(FIRST_S, self._settings.timeout))

    def cancel(self) -> None:
        """Stop the timer."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _ring(self, _signal: int, _frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if time.monotonic() - self._began_s > self._settings.timeout and not pytest_timeout.is_debugging():
            self.cancel()
            pytest_timeout.timeout_sigalrm(self._item, self._settings)
        if self._idleness is None:
            self._idleness = Idleness()
        idle_s = self._idleness.look_s()
        signal.setitimer(signal.ITIMER_REAL, NEXT_S)  # only now: a look may take seconds
        if idle_s > scaled(IDLE_S) and not pytest_timeout.is_debugging():
            self._idleness = None  # what is left of the test may hang, too
            _print_stacks()
            pytest.fail(f"neither this process nor what it has started has worked for {scaled(IDLE_S):.0f} s")


def _print_stacks() -> None:
    """Print where every thread but this one is; where this one is, its failure shows."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident in frames:
            print(f"{thread.name} waits in:", file=sys.stderr)
            traceback.print_stack(frames[thread.ident], file=sys.stderr)
