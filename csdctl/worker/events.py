"""Printing events: one line each on standard output, flushed, so that nothing is lost when we die."""

import sys
from collections.abc import Callable

from csdctl.worker.messages import Event, event_to_line


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


def emit_by(say: Callable[[str], None]) -> None:
    """From now on events are lines that `say` says."""
    _speaker.say = say


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Speaker:
    say: Callable[[str], None] = staticmethod(_print)


_speaker = _Speaker()
