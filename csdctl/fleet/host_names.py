"""Names that mpirun takes for the machine it runs on, or for one another.

Open MPI compares the names of machines up to the first dot, with the same letter case, and takes the IPv4
addresses of its own interfaces for itself. A node with such a name would never be reached: its link would run
on the host.
"""

import ipaddress
import socket
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.network import parse_local_addresses


def own_names() -> frozenset[str]:
    """Return the names, up to the first dot, and IPv4 addresses by which this host knows itself."""
    try:
        addresses = parse_local_addresses(Path("/proc/net/fib_trie").read_text(encoding="ascii"))
    except OSError:  # a kernel without IPv4
        addresses = []
    return frozenset({HOST_NAME, "localhost", _label(socket.gethostname()).lower(), *addresses})


def means_host(name: str, own: Container[str]) -> bool:
    """Return whether `name` is one of the host's `own` names, in any letter case and any domain."""
    return _label(name).lower() in own


def find_ambiguous(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of different `names` that mpirun takes for one."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(_label(name), name)
        if other != name:
            yield other, name


def _label(name: str) -> str:
    """Return the part of `name` that mpirun compares."""
    try:
        return str(ipaddress.IPv4Address(name))
    except ValueError:
        return name.partition(".")[0]
