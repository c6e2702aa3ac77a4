"""Which interfaces the two ends of a link use: on each machine the one that reaches the other machine."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from csdctl.errors import NodeError
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.network import addresses_in

Interfaces = Sequence[tuple[str, str]]
"""Name and address of each interface of a machine. One with several addresses has several entries."""


MAX_PATHS = 4


@dataclass(frozen=True)
class End:
    """One end of a link."""

    interface: str
    addresses: tuple[str, ...]
    """Those of the interface, IPv4 or IPv6 as `address` is; on a loopback, those of the whole machine."""
    address: str
    """The one that the other end connects to."""

    @property
    def is_loopback(self) -> bool:
        """Whether both ends are on one machine, and connect over its loopback."""
        return ipaddress.ip_address(self.address).is_loopback


def find_paths(
    node: str, starter: str, network: str, reached_at: str, interfaces: Mapping[str, Interfaces]
) -> list[tuple[End, End]]:
    """Return the ends of the link between `starter` and `node`, in the order in which to try them.

    `network`: a CIDR that has both addresses, or ''. `reached_at`: the name or address of the node in the
    fleet file. MPI uses it first, unless SSH passes a jump host or a forwarded port. Raises NodeError.
    """
    known, own = ([address for _, address in interfaces[machine]] for machine in (node, starter))
    named = [address for address in _resolve(reached_at) if address in known]
    usable = addresses_in(network, known)
    if network:
        candidates = [address for address in named if address in usable] or usable
    else:  # an address that both have is that of a bridge within each machine
        candidates = list(dict.fromkeys([*named, *(address for address in usable if address not in own)]))
    if not candidates:
        where = network or f"a network of {starter}"
        problem = f"it has no address in {where}: {', '.join(known) or 'none'}"
        remedy = "set `network:` in the fleet file to the network that MPI uses"
        raise NodeError(problem, node=node, remedy=remedy)
    pairs = [
        (towards, address)
        for address in candidates
        if (towards := _route(address) if starter == HOST_NAME else _nearest(address, own)) in own
    ]
    if not pairs:
        remedy = "bring the link's interface up, or set `network:` in the fleet file"
        raise NodeError(f"{starter} has no route to {', '.join(candidates)}", node=node, remedy=remedy)
    pairs.sort(key=lambda pair: (pair[1] not in named, -_shared_bits(*pair)))
    near, far = interfaces[starter], interfaces[node]
    return [(_end(towards, near), _end(address, far)) for towards, address in pairs[:MAX_PATHS]]


def _end(address: str, interfaces: Interfaces) -> End:
    used = next(name for name, other in interfaces if other == address)
    parsed = ipaddress.ip_address(address)
    same = [
        other
        for name, other in interfaces
        if (name == used or parsed.is_loopback) and ipaddress.ip_address(other).version == parsed.version
    ]
    return End(used, tuple(same), address)


def _resolve(name: str) -> list[str]:
    """Return the addresses of a host name or address, IPv4 first. [] for an unknown one."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return sorted({str(entry[4][0]) for entry in found}, key=lambda one: (":" in one, one))
    return []


def _route(address: str) -> str:
    """Return this machine's own address on the route to `address`, '' without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
        unsent.connect((address, 9))
        return str(unsent.getsockname()[0])
    return ""


def _nearest(address: str, others: Iterable[str]) -> str:
    """Return which of `others` shares the most leading bits with `address`, '' for none of its family."""
    version = ipaddress.ip_address(address).version
    same = [other for other in others if ipaddress.ip_address(other).version == version]
    return max(same, key=lambda other: _shared_bits(address, other), default="")


def _shared_bits(address: str, other: str) -> int:
    parsed = ipaddress.ip_address(address)
    return parsed.max_prefixlen - (int(parsed) ^ int(ipaddress.ip_address(other))).bit_length()
