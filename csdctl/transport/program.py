"""Programs on machines that answer in frames: the worker and the programs of csdctl/standalone.

A request is a line of JSON on the program's standard input. The program answers with any number of frames of
other kinds and then with one `result` or `error`. A node's answer is input: it may be damaged, of another
version, or made up. Each kind has a dataclass, whose annotations bound what is accepted. Any other answer is
a RemoteCommandError that names the node, and concerns that node only.
"""

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

from csdctl.errors import CsdctlError, DeadlineError, ExitCode, InputError, RemoteCommandError
from csdctl.transport.session import Completed, Deadline, Session
from csdctl.worker.protocol import json_codec
from csdctl.worker.protocol.datasets import PrepareProgress

ResultT = TypeVar("ResultT")

END_DEADLINE_S = 30.0
"""Maximum time between the last frame and the end of a program."""
MAX_LINES_PER_S = 10.0
"""A program at work prints about one line per second."""
MAX_PRINTED_LINES = 20_000
"""Lines that loading a model may print, beside frames."""
MAX_TEXT_LENGTH = 1000
"""Longer texts of errors are cut. They are shown to the user, and never used as a name or a path."""


@dataclass(frozen=True)
class AnswerLimits:
    """Limits of a program's time and of its lines. A program beyond them is ended."""

    silence_s: float = 120.0
    """Maximum time without a line: a program that works for long sends a heartbeat every second."""
    standstill_s: float = 7200.0
    """Maximum time without one more sample: the listing of millions of files, the sync of a large disk, or a
    user's function before its first sample may take long."""
    whole_s: float = 7 * 86_400.0
    """Maximum time from the request to the end."""
    spare_lines: int = 1000
    """Lines, beside MAX_LINES_PER_S, that a program or a slow network may deliver together."""


def within(deadline_s: float) -> AnswerLimits:
    """Return the limits of a program that must end within `deadline_s`, and may print meanwhile."""
    return AnswerLimits(deadline_s, deadline_s, deadline_s, MAX_PRINTED_LINES)


@dataclass(frozen=True)
class ReportedError:
    """Why a program has no result. The exit code tells bad input from a failure."""

    message: str
    remedy: str = ""
    exit_code: int = ExitCode.FAILED


@dataclass(frozen=True)
class Nothing:
    """The content of a frame that has none beside its kind."""


class ProgramEndedError(RemoteCommandError):
    """The program ended without a result."""

    done: Completed


def decode_frame(line: str, messages: Mapping[str, type]) -> tuple[str, Any] | None:
    """Return kind and message of a line, None for other text. Raises ProtocolError for other kinds."""
    if not line.startswith(json_codec.FRAME_PREFIX):
        return None
    kind, _, text = line.removeprefix(json_codec.FRAME_PREFIX).partition(" ")
    if kind not in messages:
        raise json_codec.ProtocolError(f"received {json_codec.shorten(kind)}, expected {', '.join(messages)}")
    if messages[kind] is not bytes:
        return kind, json_codec.from_json(messages[kind], text)
    try:
        return kind, base64.b64decode(text, validate=True)
    except ValueError:
        raise json_codec.ProtocolError("received a line that is not base64") from None


class Program:
    """A running program on a machine. The caller closes it, which ends it."""

    def __init__(
        self,
        session: Session,
        command: Sequence[str],
        doing: str,
        patience: AnswerLimits,
        remedy: str = "check what runs on that machine",
    ) -> None:
        """Start `command`. `doing` begins the message of every error."""
        self.node = session.name
        self.conversation = session.converse(command)
        self.last_line = ""
        self._doing = doing
        self._patience = patience
        self._remedy = remedy
        self._num_done = self._num_lines = 0
        self._start_clock()

    def _start_clock(self) -> None:
        self._whole = Deadline(self._patience.whole_s)
        self._standstill = Deadline(self._patience.standstill_s)
        self._started_s = time.monotonic()

    def send(self, request: object) -> None:
        """Send a dataclass, or a dict, as a request. A program that has ended says why when it is read."""
        self._start_clock()  # it may have been started ahead
        line = json_codec.to_json(request) if is_dataclass(request) else json.dumps(request)
        with suppress(EOFError):
            self.conversation.send_line(line)

    def read(self, messages: Mapping[str, type]) -> tuple[str, Any]:
        """Return kind and content of the next frame. Raises the errors of a program, and DeadlineError."""
        while True:
            self.last_line = self._read_line()
            try:
                frame = decode_frame(self.last_line, {**messages, json_codec.ERROR: ReportedError})
            except (json_codec.ProtocolError, RecursionError) as error:
                raise self.error(f"invalid answer: {error or 'nested too deeply'}") from None
            if frame is None:
                continue
            kind, message = frame
            if kind == json_codec.ERROR:
                error_type = InputError if message.exit_code == ExitCode.BAD_INPUT else RemoteCommandError
                text, remedy = message.message[:MAX_TEXT_LENGTH], message.remedy[:MAX_TEXT_LENGTH]
                raise error_type(text, remedy=remedy, node=self.node)
            if isinstance(message, PrepareProgress) and message.num_done > self._num_done:
                self._num_done = message.num_done
                self._standstill = Deadline(self._patience.standstill_s)
            return kind, message

    def call(
        self,
        request: object,
        result: type[ResultT],
        on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
    ) -> ResultT:
        """Send the program's only request, return its result, and close it. Raises the errors of `read`."""
        with closing(self):
            self.send(request)
            while True:
                kind, message = self.read({json_codec.PROGRESS: PrepareProgress, json_codec.RESULT: result})
                if kind == json_codec.RESULT:
                    break
                on_progress(message)
            self.finish()
        return message  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Wait for the end after the last result. Raises ProgramEndedError when it fails, DeadlineError."""
        done = self.conversation.wait(deadline_s=END_DEADLINE_S)
        if done.exit_code != 0:
            raise self.explain_end(done)

    def close(self) -> None:
        """End the program if it still runs."""
        self.conversation.close()

    def error(self, problem: str) -> RemoteCommandError:
        """Return the error for an invalid answer."""
        return RemoteCommandError(f"{self._doing}: {problem}", node=self.node, remedy=self._remedy)

    def check_clock(self) -> float:
        """Return how long to wait for the next line. Raises DeadlineError."""
        for clock, words in ((self._whole, "took"), (self._standstill, "got no further for")):
            if clock.has_passed:
                message = f"{self._doing} {words} more than {clock.seconds:g} s"
                raise DeadlineError(message, node=self.node, remedy=self._remedy)
        return min(self._patience.silence_s, self._whole.left_s, self._standstill.left_s)

    def explain_end(self, done: Completed) -> CsdctlError:
        """Return why the program has ended without a result."""
        problem, remedy = f"{self._doing} ended without a result", ""
        if done.exit_code:
            problem, remedy = done.describe_failure(self._doing), self._remedy
        error = ProgramEndedError(problem, node=self.node, remedy=remedy)
        error.done = done
        return error

    def _read_line(self) -> str:
        self._num_lines += 1
        elapsed_s = time.monotonic() - self._started_s
        if self._num_lines > self._patience.spare_lines + MAX_LINES_PER_S * elapsed_s:
            raise self.error(f"{self._num_lines} lines in {elapsed_s:.1f} s, expected one each second")
        try:
            return self.conversation.read_line(deadline_s=self.check_clock())
        except DeadlineError:
            self.check_clock()
            message = f"{self._doing}: no line for {self._patience.silence_s:g} s"
            raise DeadlineError(message, node=self.node, remedy=self._remedy) from None
        except EOFError:
            raise self.explain_end(self.conversation.wait(deadline_s=END_DEADLINE_S)) from None
