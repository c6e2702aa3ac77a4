"""Waiting for MPI without polling.

MPI's blocking calls poll without pause and burn the core that a slow node needs. Requests are tested with a
sleep in between that grows with the time waited (docs/decisions/0003).
"""

import time
from collections.abc import Callable
from typing import Any

FIRST_SLEEP_S = 0.0001
SLEEP_GROWTH = 1.3
SHORT_SLEEP_S, LONGEST_SLEEP_S = 0.002, 0.005
SLEEP_SHARE = 0.05
"""In a long wait, the share of the time waited after which a request is tested again: each wake-up costs a
slow node more."""
QUIET_S = 0.05
"""`on_wait` is not called in waits shorter than this."""

FindMissing = Callable[[], list[int]]
OnWait = Callable[[float, FindMissing], None]
"""Called after each sleep with the seconds waited so far, and what finds the ranks that are waited for."""


def ignore_wait(waited_s: float, find_missing: FindMissing) -> None:
    """Do nothing: the default `OnWait`."""


def find_none() -> list[int]:
    """Return nothing: it is not known who is waited for."""
    return []


def wait_sleeping(request: Any, on_wait: OnWait = ignore_wait, find_missing: FindMissing = find_none) -> None:
    """Return when a request of `World` is complete; raises what its `Test` raises."""
    started_s, pause_s = time.monotonic(), FIRST_SLEEP_S
    while not request.Test():
        waited_s = time.monotonic() - started_s
        time.sleep(pause_s)
        longest_s = min(LONGEST_SLEEP_S, max(SHORT_SLEEP_S, waited_s * SLEEP_SHARE))
        pause_s = min(longest_s, pause_s * SLEEP_GROWTH)
        if waited_s > QUIET_S:
            on_wait(waited_s, find_missing)
