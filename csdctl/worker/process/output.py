"""The only output of a process that reads private data.

Libraries and user code print freely, even from C: that output is discarded, or goes to a file on this
machine. Only lines written through `GuardedOutput` leave the process.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEARTBEAT_S = 1.0


class GuardedOutput:
    """The original standard output and error; all other code in this process is redirected away from them."""

    def __init__(self, redirect_to: str = os.devnull) -> None:
        """Redirect all other output to the file `redirect_to`; raises OSError if it cannot be opened."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._lock = threading.Lock()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._err = os.fdopen(os.dup(2), "w", encoding="utf-8")
        elsewhere = os.open(redirect_to, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(elsewhere, 1)
        os.dup2(elsewhere, 2)
        os.close(elsewhere)

    def write_line(self, line: str) -> None:
        """Write a line to standard output; raises BrokenPipeError if its reader is gone."""
        with self._lock:
            self._out.write(line + "\n")
            self._out.flush()

    def write_error(self, line: str) -> None:
        """Write a line to standard error."""
        self._err.write(line + "\n")
        self._err.flush()

    @contextmanager
    def heartbeat(self, line: Callable[[], str]) -> Iterator[None]:
        """Write `line()` every second inside the context, to show the reader that this process is alive.

        Exit the process if the reader is gone: the result is no longer needed.
        """
        is_done = threading.Event()

        def repeat() -> None:
            while not is_done.wait(HEARTBEAT_S):
                try:
                    self.write_line(line())
                except OSError:
                    os._exit(1)

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()
