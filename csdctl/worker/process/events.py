"""Printing events: one line each on standard output, flushed, so that nothing is lost when we die."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.events import Event, Failed, event_to_line


def emit(event: Event) -> None:
    """Print `event` in one write: lines of two threads never mix."""
    _speaker.say(event_to_line(event))


def exit_with_failure(rank: int, node: str, error: BaseException, private_log: str = "") -> NoReturn:
    """Say why this rank ends, and leave at once; what is private is told in `private_log` alone."""
    failed = _as_worker_error(error, private_log)
    emit(Failed(rank, node, failed.message, failed.remedy, failed.exit_code))
    sys.stderr.flush()
    os._exit(failed.exit_code)


def _as_worker_error(error: BaseException, private_log: str) -> WorkerError:
    """`error` as it may be told; what was not foreseen is described where that shows nothing private."""
    if isinstance(error, WorkerError):
        return error
    traceback.print_exc()
    if not private_log:
        return WorkerError(describe(error), remedy="see this rank's log")
    return WorkerError(
        f"{type(error).__name__}; what it says may show private data and stays there",
        remedy=f"see {private_log} on that node",
    )


def set_event_sink(say: Callable[[str], None]) -> None:
    """From now on events are lines that `say` says."""
    _speaker.say = say


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Speaker:
    say: Callable[[str], None] = staticmethod(_print)


_speaker = _Speaker()
