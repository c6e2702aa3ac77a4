"""The addresses of a range, and names for nodes at them; pure. workflows/discovery/scan.py connects."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import Node

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


def name_nodes(addresses: Sequence[str], *, user: str, key: Path | None, port: int) -> tuple[Node, ...]:
    """Return the machines at `addresses` as nodes csd0, csd1, …, in that order."""
    return tuple(
        Node(name=f"csd{number}", address=address, port=port, user=user, key=key)
        for number, address in enumerate(addresses)
    )
