"""Printing events: one line each on standard output, flushed, so that nothing is lost when we die."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from csdctl.worker.protocol.events import Event, Failed, event_to_line


class WorkerError(Exception):
    """The worker cannot go on; the message and the remedy are for people."""

    def __init__(self, message: str, *, remedy: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code


def describe(error: BaseException) -> str:
    """Type and first line of an error; Keras and TensorFlow add pages of their own stack to theirs."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def emit(event: Event) -> None:
    """Print `event` in one write: lines of two threads never mix."""
    _speaker.say(event_to_line(event))


def give_up(rank: int, node: str, error: BaseException, private_log: str = "") -> NoReturn:
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


def emit_by(say: Callable[[str], None]) -> None:
    """From now on events are lines that `say` says."""
    _speaker.say = say


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Speaker:
    say: Callable[[str], None] = staticmethod(_print)


_speaker = _Speaker()
