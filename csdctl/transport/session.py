"""A session: an open connection to one machine, over which commands run to completion or exchange lines.

A transport (`local`, `ssh`) implements `Process`. This module adds what holds for every transport: output is
drained and bounded, each wait has a deadline, and a command that is ended early takes its process group with
it.

csdctl's own programs start in the state directory of a node, or the project directory of the host: a path
such as `.csdctl/objects/…` means the same on every machine. The user's commands start where a login does.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from csdctl.errors import CsdctlError, DeadlineError, RemoteCommandError, UnreachableError
from csdctl.transport import commands
from csdctl.transport.meter import Meter

OUT_OF_MEMORY_CODE = 137
"""Exit code of a program that signal 9 has ended, as the kernel does when memory is exhausted."""
MAX_OUTPUT_BYTES = 1 << 20
"""Maximum size of each output of a command that is kept, and of a line."""
MAX_QUOTED_CHARS = 300
"""Maximum length of a machine's text in a message."""
SLICE_BYTES = 256 * 1024
"""Maximum size of one write: paramiko's `sendall` is quadratic in the size of its argument."""
START_S = 30.0
"""Maximum wait for a login shell to start a command."""
SEND_DEADLINE_S = 30.0
"""Maximum wait for a command to read SLICE_BYTES of its input."""
KILL_DEADLINE_S = 5.0
LEFTOVER_OUTPUT_S = 1.0
"""Maximum wait for more output after a command has ended."""
CHECK_SHELL = (
    "check the user's login shell on that machine and its start-up files (~/.bashrc, ~/.profile, "
    "…): they may read standard input or start another shell only in a terminal, if [ -t 0 ]"
)


def bounded(value: object) -> str:
    """Return a machine's text, cut to MAX_QUOTED_CHARS. Whoever shows it escapes it."""
    text = str(value)
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]} …"


def last_line(output: bytes) -> str:
    """Return the last line of `output` that is not empty, bounded, or ''."""
    return bounded(output.strip().rpartition(b"\n")[2].decode(errors="replace").strip())


@dataclass(frozen=True)
class Completed:
    """The result of a command. Each output is truncated at MAX_OUTPUT_BYTES."""

    command: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes
    duration_s: float

    @property
    def output(self) -> str:
        """Standard output as text. Bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def last_error_line(self) -> str:
        """The last non-empty line of standard error, or ''."""
        return last_line(self.stderr)

    def check(self, node: str, *, doing: str, remedy: str = "") -> "Completed":
        """Return self. Raise RemoteCommandError with `doing` in its message when the command failed."""
        if self.exit_code == 0:
            return self
        raise RemoteCommandError(self.describe_failure(doing), node=node, remedy=remedy)

    def describe_failure(self, doing: str) -> str:
        """Return why the command failed. `doing` begins the text."""
        cause = self.last_error_line or "no message"
        if self.exit_code == OUT_OF_MEMORY_CODE:
            cause = f"killed, most likely out of memory ({cause})"
        return f"{doing} failed with exit code {self.exit_code}: {cause}"


class Process(Protocol):
    """A started command, as a transport sees it."""

    def read_stdout(self, timeout_s: float) -> bytes:
        """Return the next bytes, b'' at the end. Raises TimeoutError."""

    def read_stderr(self) -> bytes:
        """Wait for the next bytes of standard error and return them, b'' at the end."""

    def write_stdin(self, data: bytes, timeout_s: float) -> None:
        """Write all of `data`. Raises TimeoutError, or OSError when the command no longer reads."""

    def close_stdin(self) -> None:
        """Signal the end of input to the command."""

    def exit_code(self, timeout_s: float) -> int:
        """Wait for the end. Raises TimeoutError, or UnreachableError when the connection was lost."""

    def kill_group(self, group: int) -> bool:
        """End process group `group` on the machine. Return whether that worked."""

    def release(self) -> None:
        """Close the pipes without ending the command."""


OnStderr = Callable[[Process, bytes], None]
"""Gets the process and what it has written to standard error, in a thread."""


class Deadline:
    """A point in time, with the seconds left until it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s <= 0.0


class Conversation:
    """A running command: its process, both outputs, and line-by-line input and output. Closing it ends it."""

    def __init__(
        self,
        name: str,
        wrapped: commands.WrappedCommand,
        process: Process,
        on_stderr: OnStderr | None = None,
        on_close: Callable[["Conversation"], None] = lambda conversation: None,
    ) -> None:
        """`name`: of the machine."""
        self.name = name
        self.command = wrapped.command
        self.process = process
        self.stdout = commands.MarkedOutput(wrapped.token, max_bytes=MAX_OUTPUT_BYTES)
        self.stderr = commands.MarkedOutput(wrapped.token, max_bytes=MAX_OUTPUT_BYTES, keep_end=True)
        self._on_stderr = on_stderr
        self._on_close = on_close
        self._partial = bytearray()
        self._lines: deque[bytearray] = deque()
        self._is_at_end = False
        self._is_closed = False
        self._is_killed = False
        self._started_s = time.monotonic()
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()

    def begin(self, script: bytes, deadline: Deadline) -> None:
        """When the login shell has started `sh`, send the script. Raises NodeError or DeadlineError."""
        start = Deadline(START_S) if deadline.left_s > START_S else deadline
        try:
            while not self.stdout.has_started:
                if self.stdout.num_before > commands.MarkedOutput.MAX_START_BYTES:
                    self.process.exit_code(start.left_s)
                chunk = self.process.read_stdout(start.left_s)
                if not chunk:
                    self.completed(self.process.exit_code(KILL_DEADLINE_S))
                self.stdout.feed(chunk)
                if start.has_passed:
                    raise TimeoutError
        except TimeoutError:
            raise self.deadline_error(start, "") from None
        self._started_s = time.monotonic()
        with contextlib.suppress(OSError):  # the command has ended, and its output says why
            self.process.write_stdin(script, KILL_DEADLINE_S)

    def run_to_end(self, stdin: bytes | None, deadline: Deadline) -> Completed:
        """Drain both outputs and return the result. End the command on any exception.

        `stdin` is written, and then the input ends. With None it stays open.
        """
        writer = threading.Thread(target=self._feed_stdin, args=(stdin, deadline), daemon=True)
        try:
            if stdin:
                writer.start()
            elif stdin is not None:
                self._feed_stdin(b"", deadline)
            while chunk := self._read_or_end(deadline):
                self.stdout.feed(chunk)
                if deadline.has_passed:  # a command that writes without pause never lets a read time out
                    raise TimeoutError
            return self.completed(self.process.exit_code(deadline.left_s))
        except TimeoutError:
            still_runs = "it could not be stopped and may run for some more seconds"
            raise self.deadline_error(deadline, "it was ended" if self.kill() else still_runs) from None
        except BaseException:
            self.kill()
            raise
        finally:
            if writer.ident is not None:
                writer.join(LEFTOVER_OUTPUT_S)
            self.close()

    def send_line(self, line: str) -> None:
        """Write one line. Raises EOFError when the command no longer reads."""
        self.send_bytes(line.encode() + b"\n")

    def send_bytes(self, data: bytes) -> None:
        """Write `data`, each slice within SEND_DEADLINE_S. Raises EOFError when the command has ended."""
        try:
            for chunk in _slices(data):
                self.process.write_stdin(chunk, SEND_DEADLINE_S)
        except TimeoutError:
            problem = f"did not read its input within {SEND_DEADLINE_S:g} s"
            raise DeadlineError(f"`{self.command[0]}` {problem}", node=self.name) from None
        except OSError as error:
            raise EOFError(f"`{self.command[0]}` on {self.name} has ended") from error

    def read_line(self, *, deadline_s: float) -> str:
        """Return the next line. Raises DeadlineError, EOFError, or RemoteCommandError for too long a line."""
        deadline = Deadline(deadline_s)
        while not self._lines and not self._is_at_end:
            self._read_more(deadline)
            if deadline.has_passed and not self._lines and not self._is_at_end:  # no read timed out
                raise self._no_response(deadline)
        if self._lines:
            return self._lines.popleft().decode(errors="replace")
        raise EOFError(f"`{self.command[0]}` on {self.name} has ended")

    def wait(self, *, deadline_s: float) -> Completed:
        """Close the input, drop unread lines and wait for the end. Raises DeadlineError."""
        deadline = Deadline(deadline_s)
        self.process.close_stdin()
        try:
            while not self._is_at_end:
                self._read_more(deadline)
                self._lines.clear()
                if deadline.has_passed and not self._is_at_end:
                    raise TimeoutError
            exit_code = self.process.exit_code(deadline.left_s)
        except TimeoutError:
            raise self.deadline_error(deadline, "it still runs") from None
        return replace(self.completed(exit_code), stdout=b"")

    def has_exited(self) -> bool:
        """Whether the command has ended. Raises UnreachableError when the connection was lost."""
        try:
            self.process.exit_code(0.0)
        except TimeoutError:
            return False
        return True

    def kill(self) -> bool:
        """End the command's process group, if its id is known. Return whether that worked."""
        self._is_killed = True
        deadline = Deadline(LEFTOVER_OUTPUT_S)
        while not self.stderr.has_started and self._stderr_reader.is_alive() and not deadline.has_passed:
            self._stderr_reader.join(0.02)  # the id arrives when the command starts
        group = self.stderr.group or self._split_merged().group
        return bool(group) and self.process.kill_group(group)

    def close(self) -> None:
        """End the command and its process group if it still runs."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self._is_killed and not self.has_exited():
                self.kill()
        except CsdctlError:
            pass  # the connection is lost, and nothing more can be done
        finally:
            self.process.release()
            self._on_close(self)

    def completed(self, exit_code: int) -> Completed:
        """Return the result. Raises RemoteCommandError if it never started, UnreachableError if closed."""
        self._stderr_reader.join(LEFTOVER_OUTPUT_S)
        if exit_code and self._is_killed:  # a session that is closed first ends its commands
            raise UnreachableError("the connection was closed", node=self.name)
        if not self.stdout.has_started:
            cause = last_line(bytes(self.stderr.preamble + self.stdout.preamble)) or "no output"
            problem = f"ended with exit code {exit_code} before `{self.command[0]}` started: {cause}"
            raise RemoteCommandError(f"the login shell {problem}", node=self.name, remedy=CHECK_SHELL)
        if exit_code == commands.CANNOT_ENTER:
            raise RemoteCommandError(
                f"it has no directory for csdctl's files: {last_line(self.stderr.kept)}",
                node=self.name,
                remedy="create it there, or set `state:` in fleet.yaml to a directory that can be written to",
            )
        duration_s = time.monotonic() - self._started_s
        return Completed(self.command, exit_code, self._split_merged().kept, self.stderr.kept, duration_s)

    def deadline_error(self, deadline: Deadline, ending: str) -> DeadlineError:
        """Return the error for a `deadline` that passed. `ending` describes the state of the command."""
        remedy = f"allow more time, or check the load of {self.name}"
        if not self.stdout.has_started:
            ending, remedy = "the login shell did not start it", CHECK_SHELL
        problem = f"`{self.command[0]}` did not finish within {deadline.seconds:g} s; {ending}"
        return DeadlineError(problem, node=self.name, remedy=remedy)

    def _split_merged(self) -> commands.MarkedOutput:
        """Return standard output, without what precedes it where a start-up file merges both outputs."""
        merged = commands.MarkedOutput(self.stdout.token, max_bytes=MAX_OUTPUT_BYTES)
        if not self.stderr.has_started:
            merged.feed(self.stdout.kept)
        return merged if merged.has_started else self.stdout

    def _read_or_end(self, deadline: Deadline) -> bytes:
        """Return the next output. b'' at its end, or when only a detached process keeps it open."""
        leftover: Deadline | None = None
        while True:
            if leftover is None and self.has_exited():
                leftover = Deadline(LEFTOVER_OUTPUT_S)
            try:
                return self.process.read_stdout(min(deadline.left_s, leftover.left_s if leftover else 0.25))
            except TimeoutError:
                if deadline.has_passed:
                    raise
            if leftover and leftover.has_passed:
                return b""

    def _read_more(self, deadline: Deadline) -> None:
        try:
            chunk = self.process.read_stdout(deadline.left_s)
        except TimeoutError:
            raise self._no_response(deadline) from None
        self._is_at_end = not chunk
        continuation, *lines = self.stdout.feed(chunk).split(b"\n")
        self._partial += continuation  # in place: a long line may come byte by byte
        for line in lines:
            self._lines.append(self._partial)
            self._partial = bytearray(line)
        if self._is_at_end and self._partial:
            self._lines.append(self._partial)
            self._partial = bytearray()
        if len(self._partial) > MAX_OUTPUT_BYTES:
            problem = f"`{self.command[0]}` wrote a line of more than {MAX_OUTPUT_BYTES} bytes"
            raise RemoteCommandError(problem, node=self.name)

    def _no_response(self, deadline: Deadline) -> DeadlineError:
        problem = f"`{self.command[0]}` did not respond within {deadline.seconds:g} s"
        return DeadlineError(problem, node=self.name)

    def _read_stderr(self) -> None:
        while self.stderr.num_before <= commands.MarkedOutput.MAX_START_BYTES and (
            data := self.process.read_stderr()
        ):
            if (data := self.stderr.feed(data)) and self._on_stderr:
                self._on_stderr(self.process, data)

    def _feed_stdin(self, stdin: bytes, deadline: Deadline) -> None:
        try:
            for chunk in _slices(stdin):
                self.process.write_stdin(chunk, deadline.left_s)
            self.process.close_stdin()
        except (OSError, ValueError, CsdctlError):
            pass  # the command ended without reading all of its input, and its exit code reports why


def _slices(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), SLICE_BYTES):
        yield data[start : start + SLICE_BYTES]


class Session(ABC):
    """An open connection to one machine. The caller owns it and closes it."""

    def __init__(
        self, name: str, meter: Meter, host_key_fingerprint: str = "", setting: commands.Setting | None = None
    ) -> None:
        """`setting`: of csdctl's own programs. `host_key_fingerprint`: SHA256, '' without SSH."""
        self.name = name
        self.meter = meter
        self.host_key_fingerprint = host_key_fingerprint
        self.setting = setting or commands.Setting()
        self._running: set[Conversation] = set()
        self._is_closed = False

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        deadline_s: float = 60.0,
        is_users: bool = False,
        needs_state: bool = True,
    ) -> Completed:
        """Run `command` (an argument list, quoted by the transport) to completion.

        With `is_users`, it runs as after a login, and what it leaves in the background stays. Without
        `needs_state`, a program of csdctl starts in the login directory. Raises DeadlineError (and ends the
        command) or UnreachableError.
        """
        deadline = Deadline(deadline_s)
        setting = self.setting if needs_state else replace(self.setting, state=None)
        wrapped = commands.build_wrapped_command(
            command, deadline_s=deadline_s, is_users=is_users, setting=setting
        )
        return self.start(wrapped, deadline).run_to_end(stdin, deadline)

    def converse(self, command: Sequence[str]) -> Conversation:
        """Start `command`. Exchange lines with it."""
        wrapped = commands.build_wrapped_command(command, deadline_s=None, setting=self.setting)
        return self.start(wrapped, Deadline(SEND_DEADLINE_S))

    def close(self) -> None:
        """End running commands, also one that another thread is starting, and close the connection."""
        self._is_closed = True
        for conversation in list(self._running):
            with contextlib.suppress(CsdctlError):
                conversation.kill()

    def start(
        self, wrapped: commands.WrappedCommand, deadline: Deadline, on_stderr: OnStderr | None = None
    ) -> Conversation:
        """Start a command, which `close` ends if it still runs. Raises NodeError, DeadlineError."""
        closed = UnreachableError("the connection was closed", node=self.name)
        if self._is_closed:
            raise closed
        process = self._start_process(wrapped, deadline)
        conversation = Conversation(self.name, wrapped, process, on_stderr, self._running.discard)
        self._running.add(conversation)
        try:
            conversation.begin(wrapped.script, deadline)
            if self._is_closed:
                conversation.kill()
                raise closed
        except BaseException:
            process.release()
            self._running.discard(conversation)
            raise
        return conversation

    @abstractmethod
    def _start_process(self, wrapped: commands.WrappedCommand, deadline: Deadline) -> Process:
        """Start a command on the machine."""
