"""Check that the host has an address in the network that MPI must use.

Open MPI silently uses other interfaces when none has an address in the network.
"""

from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.network import addresses_in, is_checked, parse_local_addresses


def check_network(network: str) -> None:
    """Raise InputError when no interface of this host has an address in `network` ('' allows any).

    IPv4 only; an IPv6 network is not checked.
    """
    if not network or not is_checked(network):
        return
    addresses = parse_local_addresses(Path("/proc/net/fib_trie").read_text())
    if not addresses_in(network, addresses):
        raise InputError(
            f"network {network}: this host has no address in it; its addresses: "
            f"{', '.join(addresses) or 'none'}",
            remedy="correct `network:` in the fleet file, or bring the tunnel's interface up",
        )
