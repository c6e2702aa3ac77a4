"""Printing events on standard output: one line each, flushed, so that none is lost if the process dies."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.events import Event, Failed, event_to_line


def emit(event: Event) -> None:
    """Print `event` in a single write, so that lines of two threads never mix."""
    _sink.write_line(event_to_line(event))


def exit_with_failure(rank: int, node: str, error: BaseException, private_log: str = "") -> NoReturn:
    """Report why this rank fails and exit immediately; private details go to `private_log` only."""
    failed = _as_worker_error(error, private_log)
    emit(Failed(rank, node, failed.message, failed.remedy, failed.exit_code))
    sys.stderr.flush()
    os._exit(failed.exit_code)


def _as_worker_error(error: BaseException, private_log: str) -> WorkerError:
    """Return `error` as it may be reported; log an unexpected one on this node, where it exposes nothing."""
    if isinstance(error, WorkerError):
        return error
    traceback.print_exc()
    if not private_log:
        return WorkerError(describe(error), remedy="see this rank's log")
    return WorkerError(
        f"{type(error).__name__}; its message may contain private data and stays on the node",
        remedy=f"see {private_log} on that node",
    )


def set_event_sink(write_line: Callable[[str], None]) -> None:
    """Pass the lines of all further events to `write_line`."""
    _sink.write_line = write_line


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _EventSink:
    write_line: Callable[[str], None] = staticmethod(_print)


_sink = _EventSink()
