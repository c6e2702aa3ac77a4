"""The output of this process: events, lines of private data, and its end when nobody reads them any more.

Libraries and user code print freely, even from C. In a process that reads private data, that output is
discarded, or goes to a file on this machine: only lines written through `GuardedOutput` leave it.
"""

import os
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from csdctl.worker.process.errors import WorkerError, describe


class GuardedOutput:
    """The original standard output. Output of all other code in this process is redirected to a file."""

    def __init__(self, redirect_to: str = os.devnull) -> None:
        """Redirect all other output to the file `redirect_to`. Raises OSError if it cannot be opened."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._lock = threading.Lock()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        elsewhere = os.open(redirect_to, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(elsewhere, 1)
        os.dup2(elsewhere, 2)
        os.close(elsewhere)

    def write_line(self, line: str) -> None:
        """Write a line to standard output. Raises BrokenPipeError if its reader is gone."""
        with self._lock:
            self._out.write(line + "\n")
            self._out.flush()

    @contextmanager
    def heartbeat(self, line: Callable[[], str]) -> Iterator[None]:
        """Write `line()` every second inside the context, to show the reader that this process is alive."""
        is_done = threading.Event()

        def repeat() -> None:
            with suppress(OSError):  # its reader is gone, which ends the process (`end_without_reader`)
                while not is_done.wait(1.0):
                    self.write_line(line())

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()


def print_line(line: str) -> None:
    """Print `line` in a single write, so that lines of two threads never mix."""
    print(f"{line}\n", end="", flush=True)


def exit_with_failure(
    rank: int, node: str, error: BaseException, *, log: str, write_line: Callable[[str], None]
) -> NoReturn:
    """Report why this rank fails and exit immediately. With a private `log`, details go only there."""
    if not isinstance(error, WorkerError):
        traceback.print_exc()  # logged on this node, where it exposes nothing
        hidden = f"{type(error).__name__}; its message may contain private data and stays on the node"
        remedy = f"see {log} on that node" if log else "see this rank's log"
        error = WorkerError(hidden if log else describe(error), remedy=remedy)
    # Its import takes longer than the start of Python, and most processes send no events.
    from csdctl.worker.protocol.events import Failed, event_to_line

    write_line(event_to_line(Failed(rank, node, error.message, error.remedy, error.exit_code)))
    sys.stderr.flush()
    os._exit(error.exit_code)


def end_without_reader() -> None:
    """From now on, end this process as soon as nobody can read its standard output any more.

    poll(2) always reports a pipe or socket whose other end was closed, and never a file.
    """
    output = os.dup(1)  # code of the user, and libraries, may redirect 1

    def wait() -> None:
        poll = select.poll()
        poll.register(output, 0)
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait, name="reader", daemon=True).start()
