"""Check that the host has the addresses that MPI needs.

Open MPI silently uses other interfaces when none has an address in the network. Its daemons never use the
loopback: without another interface they end with a message about firewalls (openpmix/prrte#1436).
"""

from collections.abc import Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.network import (
    NO_INTERFACE_REMEDY,
    addresses_in,
    has_no_interface,
    is_checked,
    parse_local_addresses,
)


def check_network(network: str) -> None:
    """Raise InputError when MPI cannot run in `network` on this host ('' allows any).

    IPv4 only; an IPv6 network is not checked.
    """
    if network and is_checked(network):
        check_addresses(network, parse_local_addresses(Path("/proc/net/fib_trie").read_text()))


def check_addresses(network: str, addresses: Sequence[str]) -> None:
    """Raise InputError when MPI cannot run in `network`, a CIDR, on a host with these addresses."""
    if not addresses_in(network, addresses):
        raise InputError(
            f"network {network}: this host has no address in it; its addresses: "
            f"{', '.join(addresses) or 'none'}",
            remedy="correct `network:` in the fleet file, or bring the tunnel's interface up",
        )
    if has_no_interface(network, addresses):
        raise InputError(
            f"network {network}: MPI's daemons need an interface besides the loopback, this host has none",
            remedy=NO_INTERFACE_REMEDY,
        )
