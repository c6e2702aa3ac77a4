"""All errors of csdctl, with their exit codes. docs/reference/python.md has them as a table.

A message says what was received, what was expected and what to do about it. The command line prints message
and remedy, and a traceback only with `-vv`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

_naming: list[Callable[[str], str]] = [str]


def option(name: str) -> str:
    """Return the name that an option has in this interface, for a message.

    `name` is the field or the argument in Python. The option min_nodes is --min-nodes on the command line.
    """
    return _naming[-1](name)


@contextmanager
def naming_options(rename: Callable[[str], str]) -> Iterator[None]:
    """Name options in messages so, not as in Python."""
    _naming.append(rename)
    try:
        yield
    finally:
        _naming.pop()


class ExitCode(IntEnum):
    """The exit code of the process. Documented in docs/reference/exit-codes.md."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    PARTIAL = 3
    UNREACHABLE = 4
    DEADLINE = 5
    LOCKED = 6
    INTERRUPTED = 130


class CsdctlError(Exception):
    """The base class: `message` says what happened, `remedy` what to do, `node` where."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, remedy: str = "", node: str = "") -> None:
        super().__init__(message)
        self.message, self.remedy, self.node = message, remedy, node

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        what_to_do = f"\n  → {self.remedy}" if self.remedy else ""
        return f"{where}{self.message}{what_to_do}"


class InputError(CsdctlError):
    """A file or an option of the user cannot be used."""

    exit_code = ExitCode.BAD_INPUT


class PartialError(CsdctlError):
    """An operation succeeded on some nodes only."""

    exit_code = ExitCode.PARTIAL


class NodeError(CsdctlError):
    """An operation failed on one node."""


class UnreachableError(NodeError):
    """No connection to a node could be opened, or it was lost."""

    exit_code = ExitCode.UNREACHABLE


class JumpHostError(UnreachableError):
    """The jump host of a node cannot be used. The same message for every node behind it."""


class HostKeyError(NodeError):
    """The host key of a node is unknown or has changed."""

    exit_code = ExitCode.UNREACHABLE


class AuthenticationError(NodeError):
    """The node does not accept the offered key or user."""

    exit_code = ExitCode.UNREACHABLE


class RemoteCommandError(NodeError):
    """A command on a node failed, or its output cannot be parsed."""


class NoNodeReachableError(CsdctlError):
    """No node of the fleet could be reached."""

    exit_code = ExitCode.UNREACHABLE


class DeadlineError(CsdctlError):
    """An operation exceeded its deadline."""

    exit_code = ExitCode.DEADLINE


class RunError(CsdctlError):
    """A training run failed."""


class OutOfMemoryError(RunError):
    """A rank was killed by the system, most likely because its machine's memory was exhausted."""
