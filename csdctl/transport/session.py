"""A session: an open connection to one machine, over which commands run to completion or exchange lines.

A transport (`local`, `ssh`) provides a `Process`. What all guarantee is here: output is drained and bounded,
every wait has a deadline, and a command that is ended early takes its process group with it.

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
from csdctl.transport.commands import (
    CANNOT_ENTER,
    HERE,
    MarkedOutput,
    Setting,
    WrappedCommand,
    build_wrapped_command,
)
from csdctl.transport.meter import Meter

OUT_OF_MEMORY_CODE = 137
"""Exit code of a program that signal 9 has ended, as the kernel does when memory is exhausted."""
MAX_OUTPUT_BYTES = 1 << 20

MAX_QUOTED_CHARS = 300
SLICE_BYTES = 256 * 1024
KILL_DEADLINE_S = 5.0
LEFTOVER_OUTPUT_S = 1.0
CHECK_SHELL = "check the user's login shell on that machine and its start-up files"


def bounded(foreign: object) -> str:
    """Return text of a machine in a length that fits into a message. Whoever shows it escapes it."""
    text = str(foreign)
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
        cause = self.last_error_line or "no message"
        if self.exit_code == OUT_OF_MEMORY_CODE:
            cause = f"killed, most likely out of memory ({cause})"
        problem = f"{doing} failed with exit code {self.exit_code}: {cause}"
        raise RemoteCommandError(problem, node=node, remedy=remedy)


"""Maximum size of one write: paramiko's `sendall` is quadratic in the size of its argument."""


"""Maximum wait for more output after the command has ended."""

START_S, QUIET_START_S = 30.0, 5.0
"""Maximum wait for a login shell to start a command, and the wait after which a second one is asked why."""


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


class Running:
    """A running command under the wrapper: its process and both outputs."""

    def __init__(self, name: str, wrapped: WrappedCommand, process: Process) -> None:
        self.name = name
        self.command = wrapped.command
        self.process = process
        self.stdout = MarkedOutput(wrapped.token, max_bytes=MAX_OUTPUT_BYTES)
        self.stderr = MarkedOutput(wrapped.token, max_bytes=MAX_OUTPUT_BYTES, keep_end=True)
        self._is_killed = False
        self._started_s = time.monotonic()
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()

    def has_begun(self, script: bytes, wait_s: float) -> bool:
        """Wait for the login shell, then send the script. Return False when it takes longer."""
        deadline = Deadline(wait_s)
        with contextlib.suppress(TimeoutError):
            while not self.stdout.has_started:
                if self.stdout.num_before > MarkedOutput.MAX_START_BYTES:
                    self.process.exit_code(deadline.left_s)
                chunk = self.process.read_stdout(deadline.left_s)
                if not chunk:
                    self.completed(self.process.exit_code(KILL_DEADLINE_S))
                self.stdout.feed(chunk)
                if deadline.has_passed:
                    raise TimeoutError
            with contextlib.suppress(OSError):  # it has ended; its output says why
                self._started_s = time.monotonic()
                self.process.write_stdin(script, KILL_DEADLINE_S)
            return True
        return False

    def run_to_end(self, stdin: bytes, deadline: Deadline) -> Completed:
        """Write `stdin`, drain both outputs and return the result. End the command on any exception."""
        writer: threading.Thread | None = None
        try:
            if stdin == b"":
                self._feed_stdin(b"", deadline)
            else:
                thread = threading.Thread(target=self._feed_stdin, args=(stdin, deadline), daemon=True)
                thread.start()
                writer = thread  # only a started thread can be waited for
            while chunk := self._read_or_end(deadline):
                self.stdout.feed(chunk)
                if deadline.has_passed:  # a command that writes without pause never lets a read time out
                    raise TimeoutError
            return self.completed(self.process.exit_code(deadline.left_s))
        except TimeoutError:
            going_on = "it could not be stopped and may run for some more seconds"
            raise self.deadline_error(deadline, "it was ended" if self.kill() else going_on) from None
        except BaseException:
            self.kill()
            raise
        finally:
            if writer:
                writer.join(LEFTOVER_OUTPUT_S)
            self.process.release()

    def completed(self, exit_code: int) -> Completed:
        """Return the result. Raises RemoteCommandError if it never started, UnreachableError if closed."""
        self._stderr_reader.join(LEFTOVER_OUTPUT_S)
        if exit_code and self._is_killed:  # a session that is closed first ends its commands
            raise UnreachableError("the connection was closed", node=self.name)
        if not self.stdout.has_started:
            said = last_line(bytes(self.stderr.preamble + self.stdout.preamble)) or "no output"
            problem = f"ended with exit code {exit_code} before `{self.command[0]}` started: {said}"
            raise RemoteCommandError(f"the login shell {problem}", node=self.name, remedy=CHECK_SHELL)
        if exit_code == CANNOT_ENTER:
            raise RemoteCommandError(
                f"it has no directory for csdctl's files: {last_line(self.stderr.kept)}",
                node=self.name,
                remedy="create it there, or set `state:` in fleet.yaml to a directory that can be written to",
            )
        duration_s = time.monotonic() - self._started_s
        return Completed(self.command, exit_code, self._find_output().kept, self.stderr.kept, duration_s)

    def kill(self) -> bool:
        """End the command's process group, if its id is known. Return whether that worked."""
        self._is_killed = True
        deadline = Deadline(LEFTOVER_OUTPUT_S)
        while not self.stderr.has_started and self._stderr_reader.is_alive() and not deadline.has_passed:
            self._stderr_reader.join(0.02)  # the id arrives when the command starts
        group = self.stderr.group or self._find_output().group
        return bool(group) and self.process.kill_group(group)

    def _find_output(self) -> MarkedOutput:
        """Return what was kept of standard output. A start-up file may have merged it with standard error."""
        merged = MarkedOutput(self.stdout.token, max_bytes=MAX_OUTPUT_BYTES)
        if not self.stderr.has_started:
            merged.feed(self.stdout.kept)
        return merged if merged.has_started else self.stdout

    def deadline_error(self, deadline: Deadline, ending: str) -> DeadlineError:
        """Return the error for a `deadline` that passed. `ending` describes the state of the command."""
        if not self.stdout.has_started:
            ending = "the login shell did not start it"
        return DeadlineError(
            f"`{self.command[0]}` did not finish within {deadline.seconds:g} s; {ending}",
            node=self.name,
            remedy=f"allow more time (--timeout), or check the load of {self.name}",
        )

    def _read_or_end(self, deadline: Deadline) -> bytes:
        """Return the next output. b'' at its end, or when only a detached process keeps it open."""
        ended: Deadline | None = None
        while True:
            if ended is None and self.has_exited():
                ended = Deadline(LEFTOVER_OUTPUT_S)
            try:
                return self.process.read_stdout(min(deadline.left_s, ended.left_s if ended else 0.25))
            except TimeoutError:
                if deadline.has_passed:
                    raise
            if ended and ended.has_passed:
                return b""

    def has_exited(self) -> bool:
        """Whether the command has ended. Raises UnreachableError when the connection was lost."""
        try:
            self.process.exit_code(0.0)
        except TimeoutError:
            return False
        return True

    def _read_stderr(self) -> None:
        while self.stderr.num_before <= MarkedOutput.MAX_START_BYTES and (data := self.process.read_stderr()):
            self.stderr.feed(data)

    def _feed_stdin(self, stdin: bytes, deadline: Deadline) -> None:
        try:
            for chunk in _slices(stdin):
                self.process.write_stdin(chunk, deadline.left_s)
            self.process.close_stdin()
        except (OSError, ValueError, CsdctlError):
            pass  # the command ended without reading all of its input; its exit code reports why


class Conversation:
    """A running command with line-by-line input and output. Closing it ends the command."""

    SEND_DEADLINE_S = 30.0

    def __init__(self, running: Running, on_close: Callable[[], None] = lambda: None) -> None:
        self.running = running
        self._on_close = on_close
        self._partial = bytearray()
        self._lines: deque[bytearray] = deque()
        self._is_at_end = False
        self._is_closed = False

    def send_line(self, line: str) -> None:
        """Write one line. Raises EOFError when the command no longer reads."""
        self.send_bytes(line.encode() + b"\n")

    def send_bytes(self, data: bytes) -> None:
        """Write `data`, each slice within SEND_DEADLINE_S. Raises EOFError when the command has ended."""
        try:
            for chunk in _slices(data):
                self.running.process.write_stdin(chunk, self.SEND_DEADLINE_S)
        except TimeoutError:
            problem = f"did not read its input within {self.SEND_DEADLINE_S:g} s"
            raise DeadlineError(f"`{self.running.command[0]}` {problem}", node=self.running.name) from None
        except OSError as error:
            raise EOFError(f"`{self.running.command[0]}` on {self.running.name} has ended") from error

    def read_line(self, *, deadline_s: float) -> str:
        """Return the next line. Raises DeadlineError, EOFError, or RemoteCommandError for too long a line."""
        deadline = Deadline(deadline_s)
        while not self._lines and not self._is_at_end:
            self._read_more(deadline)
            if deadline.has_passed and not self._lines and not self._is_at_end:  # no read timed out
                raise self._no_response(deadline)
        if self._lines:
            return self._lines.popleft().decode(errors="replace")
        raise EOFError(f"`{self.running.command[0]}` on {self.running.name} has ended")

    def read_bytes(self, *, deadline_s: float) -> bytes:
        """Return the next output, in place of lines, b'' at its end. Raises DeadlineError."""
        deadline = Deadline(deadline_s)
        while not (chunk := self._read(deadline)) and not self._is_at_end:
            if deadline.has_passed:  # no read timed out
                raise self._no_response(deadline)
        return chunk

    def wait(self, *, deadline_s: float) -> Completed:
        """Close the input, drop unread lines and wait for the end. Raises DeadlineError."""
        deadline = Deadline(deadline_s)
        self.running.process.close_stdin()
        try:
            while not self._is_at_end:
                self._read_more(deadline)
                self._lines.clear()
                if deadline.has_passed and not self._is_at_end:
                    raise TimeoutError
            exit_code = self.running.process.exit_code(deadline.left_s)
        except TimeoutError:
            raise self.running.deadline_error(deadline, "it still runs") from None
        return replace(self.running.completed(exit_code), stdout=b"")

    def close(self) -> None:
        """End the command and its process group if it still runs."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self.running.has_exited():
                self.running.kill()
        except CsdctlError:
            pass  # the connection is lost; nothing more can be done
        finally:
            self.running.process.release()
            self._on_close()

    def _read(self, deadline: Deadline) -> bytes:
        try:
            chunk = self.running.process.read_stdout(deadline.left_s)
        except TimeoutError:
            raise self._no_response(deadline) from None
        self._is_at_end = not chunk
        return self.running.stdout.feed(chunk)

    def _read_more(self, deadline: Deadline) -> None:
        first, *others = self._read(deadline).split(b"\n")
        self._partial += first  # in place: a long line may come byte by byte
        for line in others:
            self._lines.append(self._partial)
            self._partial = bytearray(line)
        if self._is_at_end and self._partial:
            self._lines.append(self._partial)
            self._partial = bytearray()
        if len(self._partial) > MAX_OUTPUT_BYTES:
            problem = f"`{self.running.command[0]}` wrote a line of more than {MAX_OUTPUT_BYTES} bytes"
            raise RemoteCommandError(problem, node=self.running.name)

    def _no_response(self, deadline: Deadline) -> DeadlineError:
        problem = f"`{self.running.command[0]}` did not respond within {deadline.seconds:g} s"
        return DeadlineError(problem, node=self.running.name)


def _slices(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), SLICE_BYTES):
        yield data[start : start + SLICE_BYTES]


class Session(ABC):
    """An open connection to one machine. The caller owns it and closes it."""

    def __init__(
        self, name: str, meter: Meter, host_key_fingerprint: str = "", setting: Setting = HERE
    ) -> None:
        """`setting`: of csdctl's own programs. `host_key_fingerprint`: SHA256, '' without SSH."""
        self.name = name
        self.meter = meter
        self.host_key_fingerprint = host_key_fingerprint
        self.setting = setting
        self._running: set[Running] = set()
        self._starting = threading.Condition()
        self._num_starting = 0
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

        `is_users`: the user's own runs as after a login, and what it leaves in the background stays. Without
        `needs_state`, csdctl's program starts there too. Raises DeadlineError (and ends the command) or
        UnreachableError.
        """
        deadline = Deadline(deadline_s)
        setting = self.setting if needs_state else replace(self.setting, state=None)
        wrapped = build_wrapped_command(command, deadline_s=deadline_s, is_users=is_users, setting=setting)
        running = self._start(wrapped, deadline)
        try:
            return running.run_to_end(stdin, deadline)
        finally:
            self._forget(running)

    def converse(self, command: Sequence[str]) -> Conversation:
        """Start `command`. Exchange lines with it."""
        wrapped = build_wrapped_command(command, deadline_s=None, setting=self.setting)
        running = self._start(wrapped, Deadline(Conversation.SEND_DEADLINE_S))
        return Conversation(running, lambda: self._forget(running))

    def close(self) -> None:
        """End running commands, also one that another thread is starting, and close the connection."""
        with self._starting:
            self._is_closed = True
            self._starting.wait_for(lambda: self._num_starting == 0, KILL_DEADLINE_S)
        for running in list(self._running):
            with contextlib.suppress(CsdctlError):
                running.kill()

    def _start(self, wrapped: WrappedCommand, deadline: Deadline) -> Running:
        """Start a command, and remember it. Raises UnreachableError when the session is closed."""
        with self._starting:
            if self._is_closed:
                raise UnreachableError("the connection was closed", node=self.name)
            self._num_starting += 1
        try:
            running = Running(self.name, wrapped, self._start_process(wrapped, deadline))
            self._running.add(running)
            try:
                self._begin(running, wrapped, deadline)
            except BaseException:
                running.process.release()
                self._running.discard(running)
                raise
            return running
        finally:
            with self._starting:
                self._num_starting -= 1
                self._starting.notify_all()

    def _begin(self, running: Running, wrapped: WrappedCommand, deadline: Deadline) -> None:
        """Send the command to `sh` when the login shell has started it. Raises NodeError otherwise."""
        name = f"`{wrapped.command[0]}`"
        if running.has_begun(wrapped.script, min(QUIET_START_S, deadline.left_s)):
            return
        reads_input = not deadline.has_passed and self._reads_input(wrapped)
        if running.has_begun(wrapped.script, 0.0 if reads_input else min(START_S, deadline.left_s)):
            return
        problem = f"the login shell did not start {name}"
        if reads_input:
            why = "a start-up file of it reads standard input, or starts another shell"
            files = "the start-up files (~/.bashrc, ~/.profile, /etc/profile, …)"
            remedy = f"let {files} do that only in a terminal: if [ -t 0 ]"
            raise RemoteCommandError(f"{problem}: {why}", node=self.name, remedy=remedy)
        if deadline.has_passed:
            raise running.deadline_error(deadline, "")
        raise DeadlineError(f"{problem} within {START_S:g} s", node=self.name, remedy=CHECK_SHELL)

    def _reads_input(self, wrapped: WrappedCommand) -> bool:
        """Return whether a login shell starts a command once its input ends, and not before."""
        with contextlib.suppress(TimeoutError, CsdctlError):
            process = self._start_process(wrapped, Deadline(QUIET_START_S))
            try:
                process.close_stdin()
                process.read_stdout(QUIET_START_S)
                return True
            finally:
                process.release()
        return False

    @abstractmethod
    def _start_process(self, wrapped: WrappedCommand, deadline: Deadline) -> Process:
        """Start a command on the machine."""

    def _forget(self, running: Running) -> None:
        self._running.discard(running)
