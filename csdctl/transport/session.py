"""The interface of every transport to one machine.

A `Session` is an open connection to one machine: the host itself (`local`) or a node over SSH (`ssh`).
Commands start in the session's home directory: the login directory of a node, or the project directory of
the host. A relative path such as `.csdctl/objects/…` thus has the same meaning on every machine. The caller
owns a session and closes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from csdctl.errors import RemoteCommandError
from csdctl.transport.meter import Meter

MAX_OUTPUT_BYTES = 1 << 20

MAX_QUOTED_CHARS = 300


def bounded(foreign: object) -> str:
    """Return text of a machine in a length that fits into a message; whoever shows it escapes it."""
    text = str(foreign)
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]} …"


def last_line(output: bytes) -> str:
    """Return the last line of `output` that is not empty, bounded, or ''."""
    return bounded(output.strip().rpartition(b"\n")[2].decode(errors="replace").strip())


@dataclass(frozen=True)
class Completed:
    """The result of a command; each output is truncated at MAX_OUTPUT_BYTES."""

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
        return last_line(self.stderr)

    def check(self, node: str, *, doing: str, remedy: str = "") -> "Completed":
        """Return self; raise RemoteCommandError with `doing` in its message when the command failed."""
        if self.exit_code == 0:
            return self
        cause = self.last_error_line or "no message"
        if self.exit_code == 137:
            cause = f"killed, most likely out of memory ({cause})"
        raise RemoteCommandError(
            f"{doing} failed with exit code {self.exit_code}: {cause}", node=node, remedy=remedy
        )


class Conversation(Protocol):
    """A running command with line-by-line input and output; closing it ends the command."""

    def send_line(self, line: str) -> None:
        """Write one line to the command's standard input; raises EOFError when it has ended."""

    def send_bytes(self, data: bytes) -> None:
        """Write `data` to its standard input; blocks until it reads; raises EOFError when it has ended."""

    def read_line(self, *, deadline_s: float) -> str:
        """Return the next line of its standard output, without the newline.

        Raises DeadlineError when no line arrives in time, EOFError when the command has ended.
        """

    def wait(self, *, deadline_s: float) -> Completed:
        """Wait for the end; `stdout` is empty, `stderr` has the end of standard error."""

    def close(self) -> None:
        """End the command and its process group if it still runs."""


class Session(Protocol):
    """An open connection to one machine."""

    name: str
    host_key_fingerprint: str
    """SHA256 fingerprint of the machine's host key; '' without SSH."""
    meter: Meter
    """Counts the bytes sent to and received from the machine."""

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        deadline_s: float = 60.0,
        is_users: bool = False,
    ) -> Completed:
        """Run `command` (an argument list, quoted by the transport) to completion.

        A command that `is_users`, the user's own, runs as after a login: with that umask, and what it leaves
        in the background stays.
        Raises DeadlineError (and ends the command on the machine) or UnreachableError.
        """

    def converse(self, command: Sequence[str]) -> Conversation:
        """Start `command`; exchange lines with it."""

    def close(self) -> None:
        """Close the connection."""
