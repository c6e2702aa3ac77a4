"""A command with fixed output, in place of one behind pipes or a channel."""

from collections.abc import Iterable
from itertools import chain

from csdctl.transport.commands import WrappedCommand
from csdctl.transport.session import Running

TOKEN = "csdctl-0"
GROUP = 77


class ScriptedProcess:
    """Implements `process.Process`; the next bytes are always there, however short the wait for them."""

    def __init__(self, chunks: Iterable[bytes], *, starts: bool = True) -> None:
        self._chunks = chain([f"{TOKEN}\n".encode()] if starts else [], chunks)
        self._errors = iter([f"{TOKEN} {GROUP}\n".encode()] if starts else [])
        self.num_read = 0
        self.is_at_end = False
        self.killed: list[int] = []
        self.is_released = False

    def read_stdout(self, timeout_s: float) -> bytes:
        self.num_read += 1
        chunk = next(self._chunks, b"")
        self.is_at_end = not chunk
        return chunk

    def read_stderr(self) -> bytes:
        return next(self._errors, b"")

    def write_stdin(self, data: bytes, timeout_s: float) -> None: ...

    def close_stdin(self) -> None: ...

    def exit_code(self, timeout_s: float) -> int:
        if not self.is_at_end:
            raise TimeoutError
        return 0

    def kill_group(self, group: int) -> bool:
        self.killed.append(group)
        return True

    def release(self) -> None:
        self.is_released = True


def start(process: ScriptedProcess) -> Running:
    """Return the command of `process`, running on csd0."""
    return Running("csd0", WrappedCommand(("cat",), (), TOKEN), process)
