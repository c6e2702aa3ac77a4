"""The sandbox of what speaks MPI on one machine: its policy, and what is known of it on both sides."""

from dataclasses import dataclass, field

from csdctl.worker.protocol.json_codec import SCHEMA

USER_VARIABLE = "CSDCTL_SANDBOX_OF"
"""In the environment of a sandbox: the user who started it, as whom the rank runs."""

SOCKETS_VARIABLE = "CSDCTL_SOCKETS"
"""In its environment too, which other users cannot read: the sockets of its policy, separated by spaces."""


@dataclass(frozen=True)
class SandboxPolicy:
    """The rights of a sandbox; without `is_confined` the command lives as long, but is not confined."""

    command: tuple[str, ...]
    """An absolute path and its arguments."""
    is_confined: bool
    key: str
    """Hex; connections between the sandboxes of one mpirun begin with a token made from it. '' for none."""
    peers: tuple[str, ...]
    """The networks, as CIDR, that it may connect to and that may connect to it."""
    sockets: tuple[str, ...] = ()
    """Names of abstract Unix sockets that it may connect to, without the leading NUL."""
    programs: tuple[str, ...] = ()
    """Programs that it may run, in addition to those of the system and of this Python."""
    files: tuple[str, ...] = ()
    """Files that are copied to the same relative paths in its scratch directory."""
    scripts: dict[str, str] = field(default_factory=dict)
    """Files to write there: name and text."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class SandboxRequest:
    """The request of a `sandbox-check`."""

    peers: tuple[str, ...] = ()
    """The networks of the other machines, as CIDR."""


@dataclass(frozen=True)
class SandboxCheck:
    """The obstacles to a sandbox on a machine; '' for none."""

    obstacle: str
    """The reason why there can be no sandbox."""
    why_open: str = ""
    """Why its ports answer at addresses outside of the peers' networks too."""


def link_address(run_id: str, rank: int, key: str) -> str:
    """Return the abstract Unix address, without its leading NUL, at which a rank awaits its link."""
    return f"csdctl/{run_id}/{rank}" + (f"/{key}" if key else "")
