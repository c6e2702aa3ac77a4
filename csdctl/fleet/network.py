"""Addresses of a machine, and the names by which this one knows itself."""

import ipaddress
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from csdctl.fleet.model import HOST_NAME

NO_INTERFACE_REMEDY = (
    "bring a network interface up, or add one that leads nowhere, as root: `ip link add csdctl0 type veth && "
    "ip address add 192.0.2.1/32 dev csdctl0 && ip link set csdctl0 up`"
)
"""PRRTE, which starts the ranks on other machines, never uses the loopback between its daemons."""


def parse_local_addresses(tables: str) -> list[str]:
    """Return the addresses of all interfaces, from /proc/net/fib_trie and if_inet6, but link-local ones."""
    addresses: dict[str, None] = {}
    address = ""
    for line in tables.split("\n"):
        if match := re.match(r"\s*\|-- (\d+\.\d+\.\d+\.\d+)$", line):
            address = match[1]
        elif "/32 host LOCAL" in line and address:
            addresses[address] = None
        elif match := re.match(r"([0-9a-f]{32}) [0-9a-f]+ [0-9a-f]+ (00|10)", line):
            addresses[str(ipaddress.IPv6Address(int(match[1], 16)))] = None
    return list(addresses)


def addresses_in(network: str, addresses: Iterable[str]) -> list[str]:
    """Return the addresses in `network`, a CIDR. With '', those that are not loopback addresses."""
    parsed = [ipaddress.ip_address(address) for address in addresses]
    if not network:
        return [str(address) for address in parsed if not address.is_loopback]
    inside = ipaddress.ip_network(network)
    return [str(address) for address in parsed if address in inside]


def has_no_interface(network: str, addresses: Iterable[str]) -> bool:
    """Return whether `network` is the loopback's, and the machine has addresses in no other."""
    if not network or not ipaddress.ip_network(network).is_loopback:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def is_this_machine(name: str) -> bool:
    """Return whether `name` is one of this machine's, in any case and domain, or an IPv4 address of it."""
    try:
        addresses = parse_local_addresses(Path("/proc/net/fib_trie").read_text(encoding="ascii"))
    except OSError:  # a kernel without IPv4
        addresses = []
    label = name.partition(".")[0].lower()
    labels = {HOST_NAME, "localhost", socket.gethostname().partition(".")[0].lower()}
    return name in addresses or (label in labels and not label.isdigit())
