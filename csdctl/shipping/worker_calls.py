"""Call commands of the worker on a machine: build argument lists, parse responses."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeVar

from csdctl.errors import CsdctlError, ExitCode, InputError, RemoteCommandError
from csdctl.transport.session import Completed, Session
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.json_codec import (
    ANSWER_PREFIX,
    PROGRESS_PREFIX,
    WORKER_ERROR_PREFIX,
    ProtocolError,
    from_json,
    to_json,
)

ResponseT = TypeVar("ResponseT")

END_DEADLINE_S = 30.0
"""Time between a worker's response and its end."""

_NOISE = re.compile(rb"[IW]\d{4} |WARNING: All log messages before absl")
"""Lines that TensorFlow always prints; never the cause of an error."""


def build_worker_command(python: str, worker_path: str, arguments: Sequence[str]) -> list[str]:
    """Return the argument list that runs the worker's command `arguments[0]`."""
    return [python, "-u", worker_path, *arguments]


def run_worker(
    session: Session,
    python: str,
    worker_path: str,
    arguments: Sequence[str],
    response: type[ResponseT],
    *,
    doing: str,
    deadline_s: float,
) -> ResponseT:
    """Run a command of the worker and parse its response; raises the error that the worker reports."""
    done = session.run(build_worker_command(python, worker_path, arguments), deadline_s=deadline_s)
    if done.exit_code != 0:
        raise worker_error(done, session.name, doing)
    responses = [line for line in done.output.splitlines() if line.startswith(ANSWER_PREFIX)]
    return _parse(
        response, responses[-1].removeprefix(ANSWER_PREFIX) if responses else "", session.name, doing
    )


def watch_worker(
    session: Session,
    python: str,
    worker_path: str,
    command: str,
    request: object,
    response: type[ResponseT],
    on_working: Callable[[PrepareProgress], None],
    *,
    doing: str,
    silence_deadline_s: float,
) -> ResponseT:
    """Run a command of the worker that may take hours: send `request`, report progress, parse its response.

    Raises the error that the worker reports, and DeadlineError after `silence_deadline_s` without output.
    """
    argv = build_worker_command(python, worker_path, [command])
    received = ""
    with closing(session.converse(argv)) as conversation:
        with suppress(EOFError):
            conversation.send_line(to_json(request))
        with suppress(EOFError):
            while True:
                line = conversation.read_line(deadline_s=silence_deadline_s)
                if line.startswith(PROGRESS_PREFIX):
                    on_working(
                        _parse(PrepareProgress, line.removeprefix(PROGRESS_PREFIX), session.name, doing)
                    )
                elif line.startswith(ANSWER_PREFIX):
                    received = line.removeprefix(ANSWER_PREFIX)
        done = conversation.wait(deadline_s=END_DEADLINE_S)
    if done.exit_code != 0:
        raise worker_error(done, session.name, doing)
    return _parse(response, received, session.name, doing)


def _parse(expected: type[ResponseT], text: str, node: str, doing: str) -> ResponseT:
    try:
        return from_json(expected, text)
    except ProtocolError as error:
        raise RemoteCommandError(f"{doing}: invalid response: {error}", node=node) from None


def worker_error(done: Completed, node: str, doing: str) -> CsdctlError:
    """Return the error of a worker's command as a CsdctlError."""
    for line in reversed(done.stderr.decode(errors="replace").splitlines()):
        if line.startswith(WORKER_ERROR_PREFIX):
            try:
                reported = json.loads(line[len(WORKER_ERROR_PREFIX) :])
                error_type = InputError if reported["exit_code"] == ExitCode.BAD_INPUT else RemoteCommandError
                return error_type(reported["message"], remedy=reported["remedy"], node=node)
            except (ValueError, KeyError, TypeError):  # truncated when the worker died
                break
    lines = [line for line in done.stderr.splitlines() if not _NOISE.match(line)]
    try:
        remedy = "check the load of that machine, then retry"
        replace(done, stderr=b"\n".join(lines)).check(node, doing=doing, remedy=remedy)
    except CsdctlError as error:
        return error
    return RemoteCommandError(f"{doing} returned no response", node=node)
