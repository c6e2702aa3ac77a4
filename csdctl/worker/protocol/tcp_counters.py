"""Byte counters that the kernel keeps for the TCP connections of a process."""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
import time
from typing import NamedTuple

from csdctl.worker.protocol.processes import duplicate_descriptor

_COUNTERS = struct.Struct("=QQ")
_COUNTERS_OFFSET = 120
"""Offset of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info, unchanged since Linux 4.1."""
DRAIN_INTERVAL_S = 0.001


class Connection(NamedTuple):
    """One TCP connection: its endpoints as 'address port', and the bytes sent in each direction."""

    local: str
    peer: str
    num_sent: int
    num_received: int


def list_connections(pid: int = 0, *, drain_s: float = 0.0) -> list[Connection]:
    """Return the open TCP connections of process `pid` (0: this process); none without permission.

    The kernel counts as sent what the peer has acknowledged. Wait up to `drain_s`, for all connections
    together, until nothing is on its way any more.
    """
    found, end_s = [], time.monotonic() + drain_s
    directory = f"/proc/{pid or 'self'}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                if os.readlink(f"{directory}/{name}").startswith("socket:"):
                    found.append(_read_connection(_duplicate(pid, int(name)), end_s))
    return [connection for connection in found if connection]


def _duplicate(pid: int, descriptor: int) -> int:
    """Duplicate file descriptor `descriptor` of process `pid` into this process; raises OSError."""
    if not pid:
        return os.dup(descriptor)
    process = os.pidfd_open(pid)
    try:
        return duplicate_descriptor(process, descriptor)
    finally:
        os.close(process)


def _read_connection(descriptor: int, drain_end_s: float) -> Connection | None:
    """Return the connection of a socket, or None if it is not a TCP connection. Closes `descriptor`."""
    with socket.socket(fileno=descriptor) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return None
        try:
            peer = found.getpeername()
        except OSError:  # a listening socket
            return None
        while _num_unacknowledged(found) and time.monotonic() < drain_end_s:
            time.sleep(DRAIN_INTERVAL_S)
        size = _COUNTERS_OFFSET + _COUNTERS.size
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) < size:
            return None
        counters = _COUNTERS.unpack_from(info, _COUNTERS_OFFSET)
        return Connection(_endpoint(found.getsockname()), _endpoint(peer), *counters)


def _num_unacknowledged(connection: socket.socket) -> int:
    """Return the bytes that were written and not yet acknowledged (SIOCOUTQ, as the number of TIOCOUTQ)."""
    answer = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def _endpoint(address: tuple[object, ...]) -> str:
    return f"{address[0]} {address[1]}"
