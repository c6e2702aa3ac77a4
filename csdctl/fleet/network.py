"""The IPv4 addresses of a machine, and which of them are in a network; pure."""

import ipaddress
import re
from collections.abc import Iterable

_LEAF = re.compile(r"\s*\|-- (\d+\.\d+\.\d+\.\d+)$")


def parse_local_addresses(fib_trie: str) -> list[str]:
    """Return the IPv4 addresses of all interfaces, from the content of /proc/net/fib_trie."""
    found: dict[str, None] = {}
    address = ""
    for line in fib_trie.split("\n"):
        if match := _LEAF.match(line):
            address = match[1]
        elif "/32 host LOCAL" in line and address:
            found[address] = None
    return list(found)


def addresses_in(network: str, addresses: Iterable[str]) -> list[str]:
    """Return the addresses in `network`, a CIDR; with '', those that are not loopback addresses."""
    found = [ipaddress.ip_address(address) for address in addresses]
    if not network:
        return [str(address) for address in found if not address.is_loopback]
    parsed = ipaddress.ip_network(network)
    return [str(address) for address in found if address.version == parsed.version and address in parsed]


def is_checked(network: str) -> bool:
    """Return whether addresses can be checked against `network`: IPv6 networks are not checked."""
    return not network or ipaddress.ip_network(network).version == 4
