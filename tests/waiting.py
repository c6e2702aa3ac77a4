"""Wait for a condition in tests."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], deadline_s: float = 20.0) -> bool:
    """Return whether `condition` becomes true within `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
