"""The processes of this machine, as /proc describes them, and the byte counters of their TCP connections."""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import termios
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from csdctl.worker.protocol.sandbox import USER_VARIABLE

_PIDFD_GETFD = 438
"""System call number of pidfd_getfd(2) on every architecture; Linux 5.6 or newer."""
LIBC = ctypes.CDLL(None, use_errno=True)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COUNTERS = struct.Struct("=QQ")
_COUNTERS_OFFSET = 120
"""Offset of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info, unchanged since Linux 4.1."""


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc/PID/stat. `start_time` in clock ticks since boot."""

    name: str
    state: str
    parent: int
    group: int
    session: int
    children_cpu_s: float
    start_time: int

    @property
    def has_ended(self) -> bool:
        """Whether it is a zombie: ended, but not reaped."""
        return self.state in "ZX"


def parse_stat(text: str) -> ProcessStat:
    """Parse the content of /proc/PID/stat. The process name may contain spaces and brackets."""
    fields = text[text.rindex(")") + 2 :].split()
    children_cpu_s = (int(fields[13]) + int(fields[14])) / _TICKS_PER_S
    parent, group, session = map(int, fields[1:4])
    name = text[text.index("(") + 1 : text.rindex(")")]
    return ProcessStat(
        name,
        state=fields[0],
        parent=parent,
        group=group,
        session=session,
        children_cpu_s=children_cpu_s,
        start_time=int(fields[19]),
    )


def load_stat(pid: int) -> ProcessStat | None:
    """Return the state of process `pid`, or None if it does not exist."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat", errors="replace") as file:
        return parse_stat(file.read())
    return None


def load_all() -> dict[int, ProcessStat]:
    """Return the state of every process by its id."""
    stats = {int(name): load_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat}


def system_call(number: int, *arguments: Any) -> int:
    """Make a system call. Raises OSError."""
    result = LIBC.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def duplicate_descriptor(process: int, descriptor: int) -> int:
    """Duplicate a file descriptor of the process with the pidfd `process` into this one. Raises OSError."""
    return system_call(_PIDFD_GETFD, ctypes.c_int(process), ctypes.c_int(descriptor), ctypes.c_uint(0))


def find_descendants(pid: int, stats: Mapping[int, ProcessStat]) -> list[int]:
    """Return all descendants of `pid` among `stats`, parents before children."""
    pids = [pid]
    for parent in pids:  # grows during the iteration
        pids += [child for child, stat in stats.items() if stat.parent == parent]
    return pids[1:]


def list_descendants() -> list[int]:
    """Return what this process has started, and what that has started. Of a subreaper, orphans too."""
    return find_descendants(os.getpid(), load_all())


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to all of `pids` that exist and belong to this user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_descendants() -> None:
    """Kill the descendants of this process, also those that start meanwhile."""
    while pids := list_descendants():
        send_signal(pids, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def is_of_user(connection: socket.socket, user: int | None = None) -> bool:
    """Whether the other end of a Unix socket runs as `user`. By default as this process, or its sandbox."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3I", peer)
    return bool(uid == (int(os.environ.get(USER_VARIABLE, os.getuid())) if user is None else user))


class Connection(NamedTuple):
    """One TCP connection: its endpoints as 'address port', and the bytes sent in each direction."""

    local: str
    peer: str
    num_sent: int
    num_received: int


def list_connections(pid: int = 0, *, drain_s: float = 0.0) -> list[Connection]:
    """Return the TCP connections of `pid`, 0: this process, after `drain_s` at most, until all is sent."""
    connections, end_s = [], time.monotonic() + drain_s
    directory = f"/proc/{pid or 'self'}/fd"
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        if pid:
            process = os.pidfd_open(pid)
            opened.callback(os.close, process)
        for number in map(int, os.listdir(directory)):
            with contextlib.suppress(OSError):
                if os.readlink(f"{directory}/{number}").startswith("socket:"):
                    # Not pidfd_getfd for this process: a sandbox does not permit it.
                    copy = duplicate_descriptor(process, number) if pid else os.dup(number)
                    connections.append(_read_connection(copy, end_s))
    return [connection for connection in connections if connection]


def _read_connection(descriptor: int, drain_end_s: float) -> Connection | None:
    """Return the connection of a socket, or None if it is not a TCP connection. Closes `descriptor`."""
    with socket.socket(fileno=descriptor) as connection:
        if (
            connection.family not in (socket.AF_INET, socket.AF_INET6)
            or connection.type != socket.SOCK_STREAM
        ):
            return None
        try:
            peer = connection.getpeername()
        except OSError:  # a listening socket
            return None
        # Bytes written and not yet acknowledged: SIOCOUTQ has the number of TIOCOUTQ.
        while any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))) and time.monotonic() < drain_end_s:
            time.sleep(0.001)
        size = _COUNTERS_OFFSET + _COUNTERS.size
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) < size:
            return None
        counters = _COUNTERS.unpack_from(info, _COUNTERS_OFFSET)
        local, peer = (" ".join(map(str, address[:2])) for address in (connection.getsockname(), peer))
        return Connection(local, peer, *counters)
