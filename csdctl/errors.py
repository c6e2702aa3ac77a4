"""Every error of csdctl, as one tree, with its exit code.

CsdctlError                 1  something failed
├── InputError              2  what a person wrote or asked for cannot be used
│   ├── TuningError         2  no plan can be made (tuning/stannis.py)
│   └── DamagedMeasurementsError 2  the measurements file cannot be read
├── PartialError            3  done on some nodes only
├── NodeError               1  one node failed at one thing
│   ├── UnreachableError    4  no connection: closed port, no answer, network
│   │   └── JumpHostError   4  the machine that the connection goes through cannot be used
│   ├── HostKeyError        4  the key the node shows is unknown or has changed
│   ├── AuthenticationError 4  the node does not accept our key
│   └── RemoteCommandError  1  a command on the node ended badly
├── NoNodeReachableError    4  not one node could be reached
├── DeadlineError           5  something took longer than it may
└── RunError                1  a training run failed
    └── OutOfMemoryError    1  a rank was killed, most likely because its memory was full

A message says what was received, what was expected and what to do about it; `node` names the
machine. The command line prints both parts and never a traceback (that is `-vv`).
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns; documented in docs/reference/exit-codes.md."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    PARTIAL = 3
    UNREACHABLE = 4
    DEADLINE = 5
    INTERRUPTED = 130


class CsdctlError(Exception):
    """The root: `message` says what happened, `remedy` what to do, `node` where."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, remedy: str = "", node: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.node = node

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        what_to_do = f"\n  → {self.remedy}" if self.remedy else ""
        return f"{where}{self.message}{what_to_do}"


class InputError(CsdctlError):
    """What a person wrote (a file, an option) cannot be used."""

    exit_code = ExitCode.BAD_INPUT


class DamagedMeasurementsError(InputError):
    """The measurements file is damaged, or is something else."""


class PartialError(CsdctlError):
    """Done on some nodes, not on others."""

    exit_code = ExitCode.PARTIAL


class NodeError(CsdctlError):
    """One node failed at one thing."""


class UnreachableError(NodeError):
    """No connection could be made to a node, or it was lost."""

    exit_code = ExitCode.UNREACHABLE


class JumpHostError(UnreachableError):
    """The jump host of a node cannot be used; the same message for every node behind it."""


class HostKeyError(NodeError):
    """The host key a node shows is unknown, or is not the one we know."""

    exit_code = ExitCode.UNREACHABLE


class AuthenticationError(NodeError):
    """The node does not accept the key or user we offer."""

    exit_code = ExitCode.UNREACHABLE


class RemoteCommandError(NodeError):
    """A command on a node ended with a non-zero exit code or unreadable output."""


class NoNodeReachableError(CsdctlError):
    """Not one node of the fleet could be reached."""

    exit_code = ExitCode.UNREACHABLE


class DeadlineError(CsdctlError):
    """Something took longer than it may."""

    exit_code = ExitCode.DEADLINE


class RunError(CsdctlError):
    """A training run failed."""


class OutOfMemoryError(RunError):
    """A rank was killed from outside, which is what becomes of who fills its machine's memory."""
