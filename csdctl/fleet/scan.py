"""The addresses of a range, and the nodes found at them; pure. What knocks there is in workflows/scan."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import Node

MAX_ADDRESSES = 4096


def expand_addresses(cidr: str) -> list[str]:
    """Every host address of `cidr`, such as 10.1.2.0/24 or fd00::/120.

    Raises InputError when it is no network, or has more than MAX_ADDRESSES.
    """
    try:
        network = ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        raise InputError(
            f"{cidr!r} is not an address range", remedy="write it as ADDRESS/BITS, such as 10.1.2.0/24"
        ) from None
    if network.num_addresses > MAX_ADDRESSES:
        raise InputError(
            f"{cidr} has {network.num_addresses} addresses, and at most {MAX_ADDRESSES} are tried",
            remedy="name a smaller range, or several one after the other",
        )
    return [str(address) for address in network.hosts()]


def name_nodes(addresses: Sequence[str], *, user: str, key: Path | None, port: int) -> tuple[Node, ...]:
    """The machines at `addresses` as nodes csd0, csd1, …, in that order."""
    return tuple(
        Node(name=f"csd{number}", address=address, port=port, user=user, key=key)
        for number, address in enumerate(addresses)
    )
