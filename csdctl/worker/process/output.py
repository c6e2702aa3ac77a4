"""The only voice of a process that reads private data.

Libraries, and code of the user, print what they like, even from C: it goes nowhere, or into a file of this
machine. What is said here is all that leaves the process.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEARTBEAT_S = 1.0


class GuardedOutput:
    """Standard output and error as they were; from now on nobody else in this process has them."""

    def __init__(self, rest: str = os.devnull) -> None:
        """`rest` is the file that everything else goes into; raises OSError when it cannot be opened."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._lock = threading.Lock()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._err = os.fdopen(os.dup(2), "w", encoding="utf-8")
        elsewhere = os.open(rest, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(elsewhere, 1)
        os.dup2(elsewhere, 2)
        os.close(elsewhere)

    def say(self, line: str) -> None:
        """A line on standard output; raises BrokenPipeError when nobody listens any more."""
        with self._lock:
            self._out.write(line + "\n")
            self._out.flush()

    def complain(self, line: str) -> None:
        """A line on standard error."""
        self._err.write(line + "\n")
        self._err.flush()

    @contextmanager
    def repeating(self, line: Callable[[], str]) -> Iterator[None]:
        """Say `line()` every second meanwhile, so that who listens knows that we live.

        The process ends when nobody listens: what it would go on with is nobody's any more.
        """
        is_done = threading.Event()

        def repeat() -> None:
            while not is_done.wait(HEARTBEAT_S):
                try:
                    self.say(line())
                except OSError:
                    os._exit(1)

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()
