"""Whether the host is in the network that MPI is told to use.

Open MPI takes a network that no interface is in without a word, and goes another way.
"""

import fcntl
import ipaddress
import socket
import struct

from csdctl.errors import InputError

SIOCGIFADDR = 0x8915


def check_network(network: str) -> None:
    """Raise InputError when no interface of this host has an address in `network` ('' allows any).

    IPv4 only; an IPv6 network is not checked.
    """
    if not network:
        return
    wanted = ipaddress.ip_network(network)
    if wanted.version != 4:
        return
    addresses = find_addresses()
    if not any(ipaddress.ip_address(address) in wanted for address in addresses):
        raise InputError(
            f"network {network}: this host has no address in it, it has {', '.join(addresses) or 'none'}",
            remedy="mend `network:` in the fleet file, or bring the tunnel's interface up",
        )


def find_addresses() -> list[str]:
    """The IPv4 address of every interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found
