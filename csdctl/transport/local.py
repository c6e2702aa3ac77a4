"""The host itself as a session, with subprocesses."""

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.transport.commands import Setting, WrappedCommand
from csdctl.transport.meter import Meter
from csdctl.transport.session import Deadline, Session

_READ_BYTES = 1 << 16


class LocalSession(Session):
    """The session of this machine. Commands start in `directory`."""

    def __init__(self, name: str, directory: Path, variables: Mapping[str, str] | None = None) -> None:
        """`variables` are `env` of fleet.yaml."""
        super().__init__(name, Meter(), setting=Setting(variables or {}))
        self._directory = directory

    def _start_process(self, wrapped: WrappedCommand, deadline: Deadline) -> "_PipedProcess":
        try:
            return _PipedProcess(wrapped.argv, self._directory)
        except OSError as error:
            raise InputError(f"`{wrapped.command[0]}` cannot be started: {error}", node=self.name) from error


class _PipedProcess:
    """A child process with three pipes. Implements `session.Process`."""

    def __init__(self, argv: Sequence[str], directory: Path) -> None:
        self._popen = subprocess.Popen(
            argv,
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdin
        assert self._popen.stdout
        assert self._popen.stderr
        self._stdin, self._stdout, self._stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        os.set_blocking(self._stdin.fileno(), False)
        self._is_released = False

    def read_stdout(self, timeout_s: float) -> bytes:
        _wait_for(self._stdout.fileno(), select.POLLIN, timeout_s)
        return os.read(self._stdout.fileno(), _READ_BYTES)

    def read_stderr(self) -> bytes:
        chunk = b""
        while not self._is_released:
            with contextlib.suppress(TimeoutError):
                _wait_for(self._stderr.fileno(), select.POLLIN, 0.5)
                chunk = os.read(self._stderr.fileno(), _READ_BYTES)
                break
        if not chunk:
            self._stderr.close()
        return chunk

    def write_stdin(self, data: bytes, timeout_s: float) -> None:
        if self._stdin.closed:
            raise BrokenPipeError("its input was closed")
        deadline, unsent = Deadline(timeout_s), memoryview(data)
        while unsent:
            _wait_for(self._stdin.fileno(), select.POLLOUT, deadline.left_s)
            with contextlib.suppress(BlockingIOError):
                unsent = unsent[os.write(self._stdin.fileno(), unsent) :]

    def close_stdin(self) -> None:
        self._stdin.close()

    def exit_code(self, timeout_s: float) -> int:
        """Wait for the end. Return 128 + N for signal N, as a shell does."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return 128 - code if code < 0 else code

    def kill_group(self, group: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5.0)
        return self._popen.returncode is not None

    def release(self) -> None:
        """Close the pipes, except standard error, which its reader closes."""
        self._is_released = True
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def _wait_for(descriptor: int, event: int, timeout_s: float) -> None:
    poll = select.poll()  # unlike select(), accepts descriptors above 1023
    poll.register(descriptor, event)
    if not poll.poll(timeout_s * 1000):
        raise TimeoutError
