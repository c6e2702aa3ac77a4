"""Find machines: connect to every address of some ranges and return those with an SSH server."""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from csdctl.errors import InputError, NoNodeReachableError
from csdctl.fleet.model import Node
from csdctl.transport.many import run_on_all

MAX_ADDRESSES = 4096


def expand_addresses(cidr: str) -> list[str]:
    """Return every host address of `cidr`, such as 10.1.2.0/24 or fd00::/120.

    Raises InputError for an invalid network or more than MAX_ADDRESSES addresses.
    """
    try:
        network = ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        raise InputError(
            f"{cidr!r} is not an address range", remedy="write it as ADDRESS/BITS, such as 10.1.2.0/24"
        ) from None
    if network.num_addresses > MAX_ADDRESSES:
        raise InputError(
            f"{cidr} has {network.num_addresses} addresses, but at most {MAX_ADDRESSES} are scanned",
            remedy="give a smaller range, or run several scans",
        )
    return [str(address) for address in network.hosts()]


SCAN_CONNECT_S = 1.0
SCAN_BANNER_S = 3.0
SCAN_AT_ONCE = 128
"""Concurrent sockets; well below the usual `ulimit -n` of 256 or more."""


def scan(
    cidrs: Sequence[str],
    *,
    user: str,
    key: Path | None = None,
    port: int = 22,
    connect_timeout_s: float = SCAN_CONNECT_S,
    banner_timeout_s: float = SCAN_BANNER_S,
) -> tuple[Node, ...]:
    """Return the machines of `cidrs` with an SSH server at `port`, except this one, as nodes csd0, csd1, ….

    Raises InputError for an invalid range, NoNodeReachableError when no server responds.
    """
    addresses = list(dict.fromkeys(address for cidr in cidrs for address in expand_addresses(cidr)))
    outcomes = run_on_all(
        {address: address for address in addresses},
        lambda address: _has_ssh_banner(address, port, connect_timeout_s, banner_timeout_s),
        max_workers=SCAN_AT_ONCE,
    )
    found = [address for address, outcome in outcomes.items() if outcome.value]
    if not found:
        raise NoNodeReachableError(
            f"none of {len(addresses)} addresses in {', '.join(cidrs)} has an SSH server at port {port}",
            remedy="check the range and --port, and that the machines are on",
        )
    return tuple(
        Node(f"csd{number}", address, port=port, user=user, key=key) for number, address in enumerate(found)
    )


def _has_ssh_banner(address: str, port: int, connect_timeout_s: float, banner_timeout_s: float) -> bool:
    """Return whether another machine's SSH server sends its banner."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as connection:
        connection.settimeout(connect_timeout_s)
        connection.connect((address, port))
        connection.settimeout(banner_timeout_s)
        is_other = connection.getsockname()[0] != address
        return is_other and connection.recv(4).startswith(b"SSH-")
    return False
