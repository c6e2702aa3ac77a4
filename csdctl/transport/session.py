"""What every transport can do with one machine.

A `Session` is an open way to one machine: the host itself (`local`), a node over SSH (`ssh`), or a
scripted one (`fake`). Commands start in the session's home directory: a node's login directory, or
on the host the project directory, so that a relative path such as `.csdctl/objects/…` means the
same on every machine. The caller owns a session and closes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from csdctl.errors import RemoteCommandError
from csdctl.transport.meter import Meter

MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class Completed:
    """How a command ended; outputs are cut at MAX_OUTPUT_BYTES each."""

    command: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes
    duration_s: float

    @property
    def output(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def last_error_line(self) -> str:
        """The last non-empty line of standard error, or ''."""
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def check(self, node: str, *, doing: str, remedy: str = "") -> "Completed":
        """Return self, or raise RemoteCommandError that says what was being done."""
        if self.exit_code == 0:
            return self
        cause = self.last_error_line or "no message"
        if self.exit_code == 137:
            cause = f"killed, most likely out of memory ({cause})"
        raise RemoteCommandError(
            f"{doing} failed with exit code {self.exit_code}: {cause}", node=node, remedy=remedy
        )


class Conversation(Protocol):
    """A running command that is spoken to line by line; closing it ends the command."""

    def send_line(self, line: str) -> None:
        """Write one line to the command's standard input; raises EOFError when it has ended."""

    def send_bytes(self, data: bytes) -> None:
        """Write `data` to its standard input; waits while it does not read, raises EOFError when it ended."""

    def read_line(self, *, deadline_s: float) -> str:
        """The next line of its standard output, without the line end.

        Raises DeadlineError when none came in time, EOFError when the command has ended.
        """

    def wait(self, *, deadline_s: float) -> Completed:
        """Wait for the end; `stdout` holds nothing, `stderr` the end of standard error."""

    def close(self) -> None:
        """End the command if it still runs, and whatever it started."""


class Session(Protocol):
    """An open way to one machine."""

    name: str
    host_key_fingerprint: str
    """SHA256 fingerprint of the key the machine showed; '' where there is none."""
    meter: Meter
    """Counts the bytes that go to the machine and come from it."""

    def run(self, command: Sequence[str], *, stdin: bytes = b"", deadline_s: float = 60.0) -> Completed:
        """Run `command` (an argument list, quoted by the transport) to its end.

        Raises DeadlineError (and ends the command on the machine) or UnreachableError.
        """

    def converse(self, command: Sequence[str]) -> Conversation:
        """Start `command` and talk to it."""

    def close(self) -> None:
        """Close the connection."""
