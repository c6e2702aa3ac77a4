"""The interfaces of the two ends of a link: on each machine, the interface that reaches the other machine."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from csdctl.errors import NodeError
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.network import addresses_in

Interfaces = Sequence[tuple[str, str]]
"""Names and addresses of a machine's interfaces. An interface with several addresses has several entries."""
MAX_PATHS = 4
"""The number of paths to try for a link."""


@dataclass(frozen=True)
class End:
    """One end of a link."""

    interface: str
    addresses: tuple[str, ...]
    """The addresses of the interface, all IPv4 or all IPv6. On a loopback, the addresses of the machine."""
    address: str
    """The address that the other end connects to."""

    @property
    def is_loopback(self) -> bool:
        """Whether both ends are on one machine and connect over its loopback."""
        return ipaddress.ip_address(self.address).is_loopback


def find_paths(
    node: str, starter: str, network: str, reached_at: str, interfaces: Mapping[str, Interfaces]
) -> list[tuple[End, End]]:
    """Return the ends of the link between `starter` and `node`, in the order in which to try them.

    `network`: a CIDR that has both addresses, or ''. `reached_at`: the name or address of the node in the
    fleet file. MPI uses it first, unless SSH passes a jump host or a forwarded port. Raises NodeError.
    """
    far_addresses, near_addresses = ([address for _, address in interfaces[name]] for name in (node, starter))
    named = [address for address in _resolve(reached_at) if address in far_addresses]
    usable = addresses_in(network, far_addresses)
    if network:
        candidates = [address for address in named if address in usable] or usable
    else:  # an address that both machines have belongs to a bridge within each
        distinct = (address for address in usable if address not in near_addresses)
        candidates = list(dict.fromkeys([*named, *distinct]))
    if not candidates:
        where = network or f"a network of {starter}"
        problem = f"it has no address in {where}: {', '.join(far_addresses) or 'none'}"
        remedy = "set `network:` in the fleet file to the network that MPI uses"
        raise NodeError(problem, node=node, remedy=remedy)
    pairs = [
        (source, address)
        for address in candidates
        if (source := _route(address) if starter == HOST_NAME else _nearest(address, near_addresses))
        in near_addresses
    ]
    if not pairs:
        remedy = "bring the link's interface up, or set `network:` in the fleet file"
        raise NodeError(f"{starter} has no route to {', '.join(candidates)}", node=node, remedy=remedy)
    pairs.sort(key=lambda pair: (pair[1] not in named, -_count_shared_bits(*pair)))
    near, far = interfaces[starter], interfaces[node]
    return [(_build_end(source, near), _build_end(address, far)) for source, address in pairs[:MAX_PATHS]]


def _build_end(address: str, interfaces: Interfaces) -> End:
    interface = next(name for name, candidate in interfaces if candidate == address)
    is_loopback = ipaddress.ip_address(address).is_loopback
    addresses = [candidate for name, candidate in interfaces if name == interface or is_loopback]
    return End(interface, tuple(_of_same_version(address, addresses)), address)


def _resolve(name: str) -> list[str]:
    """Return the addresses of a host name or address, IPv4 first. [] for an unknown one."""
    with contextlib.suppress(OSError, UnicodeError):
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return sorted({str(entry[4][0]) for entry in entries}, key=lambda address: (":" in address, address))
    return []


def _route(address: str) -> str:
    """Return this machine's own address on the route to `address`, '' without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
        unsent.connect((address, 9))
        return str(unsent.getsockname()[0])
    return ""


def _nearest(address: str, candidates: Iterable[str]) -> str:
    """Return the candidate that shares the most leading bits with `address`, '' for none of its version."""
    same = _of_same_version(address, candidates)
    return max(same, key=lambda candidate: _count_shared_bits(address, candidate), default="")


def _of_same_version(address: str, candidates: Iterable[str]) -> list[str]:
    version = ipaddress.ip_address(address).version
    return [candidate for candidate in candidates if ipaddress.ip_address(candidate).version == version]


def _count_shared_bits(first: str, second: str) -> int:
    parsed = ipaddress.ip_address(first)
    return parsed.max_prefixlen - (int(parsed) ^ int(ipaddress.ip_address(second))).bit_length()
