"""From an address range to a fleet.yaml; pure.

What knocks at the addresses is in workflows/discover; here are the addresses, and the file for those found.
"""

import ipaddress
from collections.abc import Sequence
from pathlib import Path

import yaml

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


def render_fleet(nodes: Sequence[Node], *, network: str) -> str:
    """fleet.yaml for `nodes`, which share port, user and key; raises InputError when there is none."""
    if not nodes:
        raise InputError("a fleet needs a node")
    defaults: dict[str, object] = {"port": nodes[0].port, "user": nodes[0].user}
    if nodes[0].key:
        defaults["key"] = str(nodes[0].key)
    content = {
        "network": network,
        "defaults": defaults,
        "nodes": [{"name": node.name, "address": node.address} for node in nodes],
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return f"# Found by `csdctl discover --cidr {network}`; change it as you like.\n{text}"
