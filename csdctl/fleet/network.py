"""The IPv4 addresses of a machine, and those inside a network; pure."""

import ipaddress
import re
from collections.abc import Iterable

_LEAF = re.compile(r"\s*\|-- (\d+\.\d+\.\d+\.\d+)$")


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


def addresses_in(network: str, addresses: Iterable[str]) -> list[str]:
    """Those of `addresses` that lie inside `network`, a CIDR; '' means those that are no loopback."""
    found = [ipaddress.ip_address(address) for address in addresses]
    if not network:
        return [str(address) for address in found if not address.is_loopback]
    wanted = ipaddress.ip_network(network)
    return [str(address) for address in found if address.version == wanted.version and address in wanted]


def is_checked(network: str) -> bool:
    """Whether addresses can be compared with `network`: an IPv6 network is not checked."""
    return not network or ipaddress.ip_network(network).version == 4
