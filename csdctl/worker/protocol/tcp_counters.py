"""What the kernel has counted of a process's TCP connections."""

import contextlib
import ctypes
import os
import socket
import struct
from dataclasses import dataclass

_PIDFD_GETFD = 438
"""The number of pidfd_getfd(2) on every architecture; Linux 5.6 and newer."""
_COUNTS = struct.Struct("=QQ")
_COUNTS_PLACE = 120
"""tcpi_bytes_acked and tcpi_bytes_received within struct tcp_info, the same since Linux 4.1."""


@dataclass(frozen=True)
class Connection:
    """One TCP connection: its ends, as 'address port', and the bytes it has carried in each direction."""

    local: str
    peer: str
    num_sent: int
    num_received: int


def list_connections(pid: int = 0) -> list[Connection]:
    """The TCP connections that process `pid`, 0 for this one, has open; none where that may not be seen."""
    found = []
    place = f"/proc/{pid or 'self'}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            with contextlib.suppress(OSError):
                if os.readlink(f"{place}/{name}").startswith("socket:"):
                    found.append(_read(_borrow(pid, int(name))))
    return [one for one in found if one]


def _borrow(pid: int, descriptor: int) -> int:
    """A descriptor of this process for what is `descriptor` in process `pid`; raises OSError."""
    if not pid:
        return os.dup(descriptor)
    process = os.pidfd_open(pid)
    try:
        borrowed: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if borrowed < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return borrowed


def _read(descriptor: int) -> Connection | None:
    """What is known of a socket; None when it is not a TCP connection. Closes `descriptor`."""
    with socket.socket(fileno=descriptor) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return None
        try:
            peer = one.getpeername()
        except OSError:  # it listens
            return None
        counts = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS_PLACE + _COUNTS.size)
        if len(counts) < _COUNTS_PLACE + _COUNTS.size:
            return None
        return Connection(_show(one.getsockname()), _show(peer), *_COUNTS.unpack_from(counts, _COUNTS_PLACE))


def _show(end: tuple[object, ...]) -> str:
    return f"{end[0]} {end[1]}"
