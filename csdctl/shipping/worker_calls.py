"""Calling the worker's commands on a machine: argument lists, and its answers back as values."""

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

AnswerT = TypeVar("AnswerT")

END_DEADLINE_S = 30.0
"""Between a worker's answer and its end."""

_NOISE = re.compile(rb"[IW]\d{4} |WARNING: All log messages before absl")
"""What TensorFlow prints whatever happens; never the cause."""


def build_worker_command(python: str, worker_path: str, arguments: Sequence[str]) -> list[str]:
    """The argument list that runs the worker's command `arguments[0]`."""
    return [python, "-u", worker_path, *arguments]


def run_worker(
    session: Session,
    python: str,
    worker_path: str,
    arguments: Sequence[str],
    answer: type[AnswerT],
    *,
    doing: str,
    deadline_s: float,
) -> AnswerT:
    """Run one of the worker's commands and read its answer; raises what the worker said went wrong."""
    done = session.run(build_worker_command(python, worker_path, arguments), deadline_s=deadline_s)
    if done.exit_code != 0:
        raise worker_error(done, session.name, doing)
    answers = [line for line in done.output.splitlines() if line.startswith(ANSWER_PREFIX)]
    return _parse(answer, answers[-1].removeprefix(ANSWER_PREFIX) if answers else "", session.name, doing)


def watch_worker(
    session: Session,
    python: str,
    worker_path: str,
    command: str,
    told: object,
    answer: type[AnswerT],
    on_working: Callable[[PrepareProgress], None],
    *,
    doing: str,
    silence_deadline_s: float,
) -> AnswerT:
    """Run a worker's command that may take hours: give it `told`, follow it, and read its answer.

    Raises what the worker said went wrong, and DeadlineError when nothing came for `silence_deadline_s`.
    """
    argv = build_worker_command(python, worker_path, [command])
    answered = ""
    with closing(session.converse(argv)) as conversation:
        with suppress(EOFError):
            conversation.send_line(to_json(told))
        with suppress(EOFError):
            while True:
                line = conversation.read_line(deadline_s=silence_deadline_s)
                if line.startswith(PROGRESS_PREFIX):
                    on_working(
                        _parse(PrepareProgress, line.removeprefix(PROGRESS_PREFIX), session.name, doing)
                    )
                elif line.startswith(ANSWER_PREFIX):
                    answered = line.removeprefix(ANSWER_PREFIX)
        done = conversation.wait(deadline_s=END_DEADLINE_S)
    if done.exit_code != 0:
        raise worker_error(done, session.name, doing)
    return _parse(answer, answered, session.name, doing)


def _parse(kind: type[AnswerT], text: str, node: str, doing: str) -> AnswerT:
    try:
        return from_json(kind, text)
    except ProtocolError as error:
        raise RemoteCommandError(f"{doing}: unreadable answer: {error}", node=node) from None


def worker_error(done: Completed, node: str, doing: str) -> CsdctlError:
    """The error that a worker's command ended with, as one of csdctl's."""
    for line in reversed(done.stderr.decode(errors="replace").splitlines()):
        if line.startswith(WORKER_ERROR_PREFIX):
            try:
                said = json.loads(line[len(WORKER_ERROR_PREFIX) :])
                kind = InputError if said["exit_code"] == ExitCode.BAD_INPUT else RemoteCommandError
                return kind(said["message"], remedy=said["remedy"], node=node)
            except (ValueError, KeyError, TypeError):  # cut short as the worker died
                break
    words = [line for line in done.stderr.splitlines() if not _NOISE.match(line)]
    try:
        remedy = "look what else that machine does, then try again"
        replace(done, stderr=b"\n".join(words)).check(node, doing=doing, remedy=remedy)
    except CsdctlError as error:
        return error
    return RemoteCommandError(f"{doing} gave no answer", node=node)
