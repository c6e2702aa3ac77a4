"""The sandbox of what speaks MPI on one machine: its policy, and what is known of it on both sides."""

import hashlib
import zlib
from dataclasses import dataclass, field
from typing import Annotated

from csdctl.worker.protocol.json_codec import MAX_RANKS, SCHEMA, MaxLength, ShortText

FIRST_USER = 1_907_000_000
"""The first of the users that root becomes: outside of all ranges of accounts and containers."""
NUM_RUNS = 3600
"""Number of user ID ranges, with MAX_RANKS IDs each; all IDs are below 2³¹."""

USER_VARIABLE = "CSDCTL_SANDBOX_OF"
"""In the environment of a sandbox: the user who started it, as whom the rank runs."""

SOCKETS_VARIABLE = "CSDCTL_SOCKETS"
"""In its environment too, which other users cannot read: the sockets of its policy, separated by spaces."""


NO_CONNECTION = "no connection to "
"""The beginning of what a sandbox prints of a peer that it cannot connect to."""
CONNECTED = "@csdctl-connected"
"""What the end of a link beside the hub prints, and nothing else, when both ends are connected."""


@dataclass(frozen=True)
class SandboxPolicy:
    """The rights of a sandbox. Without `is_confined` the command lives as long, but is not confined."""

    command: tuple[str, ...]
    is_confined: bool
    key: str
    """Hex; connections between the two sandboxes of a link begin with a token made from it. '' for none."""
    peers: tuple[str, ...]
    """The addresses of its peer, or the networks that they are in, as CIDR: it has no other connections."""
    sockets: tuple[str, ...] = ()
    """Names of abstract Unix sockets that it may connect to, without the leading NUL."""
    programs: tuple[str, ...] = ()
    """Programs that it may run, in addition to those of the system and of this Python."""
    files: tuple[str, ...] = ()
    """Files that are copied to the same relative paths in its scratch directory."""
    scripts: dict[str, str] = field(default_factory=dict)
    user: int = FIRST_USER
    """Its user ID if root starts it; otherwise the user does not change."""
    memory_bytes: int = 2 << 30
    """The memory of its own, in bytes, that each of its processes may allocate."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class SandboxCheck:
    """Whether a machine can run a sandbox, and its network interfaces."""

    obstacle: str = ""
    """The reason why there can be no sandbox."""
    interfaces: Annotated[tuple[tuple[ShortText, ShortText], ...], MaxLength(1000)] = ()
    """Name and address of each network interface; an interface with several addresses has several entries."""


def user_of_link(run_id: str, rank: int) -> int:
    """Return the user ID of both ends of a rank's link if root starts them. Chosen by run and rank."""
    return FIRST_USER + zlib.crc32(run_id.encode()) % NUM_RUNS * MAX_RANKS + rank


def link_address(run_id: str, rank: int, key: str) -> str:
    """Return the abstract Unix address, without its NUL, at which a rank on a node awaits its link."""
    return f"csdctl/{run_id}/{rank}/{key}"


def hub_address(run_id: str, rank: int, key: str) -> str:
    """Return the address at which a hub accepts the link of a rank. It reveals no address of another rank."""
    return f"csdctl/{run_id}/hub/{rank}/{hashlib.sha256(f'{key}/{rank}'.encode()).hexdigest()[:32]}"
