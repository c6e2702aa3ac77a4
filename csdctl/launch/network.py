"""Whether the host is in the network that MPI is told to use.

Open MPI takes a network that no interface is in without a word, and goes another way.
"""

import ipaddress
import re
from pathlib import Path

from csdctl.errors import InputError

_LEAF = re.compile(r"\s*\|-- (\d+\.\d+\.\d+\.\d+)$")


def check_network(network: str) -> None:
    """Raise InputError when no interface of this host has an address in `network` ('' allows any).

    IPv4 only; an IPv6 network is not checked.
    """
    if not network:
        return
    wanted = ipaddress.ip_network(network)
    if wanted.version != 4:
        return
    addresses = parse_local_addresses(Path("/proc/net/fib_trie").read_text())
    if not any(ipaddress.ip_address(address) in wanted for address in addresses):
        raise InputError(
            f"network {network}: this host has no address in it, it has {', '.join(addresses) or 'none'}",
            remedy="mend `network:` in the fleet file, or bring the tunnel's interface up",
        )


def parse_local_addresses(fib_trie: str) -> list[str]:
    """The IPv4 addresses of all interfaces, from the text of /proc/net/fib_trie."""
    found: dict[str, None] = {}
    address = ""
    for line in fib_trie.splitlines():
        if match := _LEAF.match(line):
            address = match[1]
        elif "/32 host LOCAL" in line and address:
            found[address] = None
    return list(found)
