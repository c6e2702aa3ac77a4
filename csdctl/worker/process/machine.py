"""Memory and times of this process, and network interfaces of this machine."""

import array
import contextlib
import fcntl
import ipaddress
import mmap
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

_SIOCGIFCONF = 0x8912
_INTERFACE = struct.Struct("16s4x4s16x" if struct.calcsize("P") == 8 else "16s4x4s8x")
"""struct ifreq of netdevice(7) with an IPv4 address."""


def peak_memory_bytes() -> int:
    """Return the peak resident set size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Return the resident set size of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def data_bytes() -> int:
    """Return the size of this process's own writable memory: what `limit_data` counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE


def limit_data(num_bytes: int) -> None:
    """Let allocations fail that would take this process's own writable memory above `num_bytes`.

    A lower limit of the machine stays.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def list_interfaces() -> list[tuple[str, str]]:
    """Return name and address of each network interface, IPv4 and IPv6, without link-local addresses."""
    interfaces = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        entries = array.array("B", bytes(1000 * _INTERFACE.size))
        place, size = entries.buffer_info()
        request = struct.pack("iP", size, place)
        (length, _) = struct.unpack("iP", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))
        for name, address in _INTERFACE.iter_unpack(entries.tobytes()[:length]):
            label = name.partition(b"\0")[0].decode()
            interfaces.append((label.partition(":")[0], socket.inet_ntoa(address)))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, _, _, name = line.split()
            address6 = ipaddress.IPv6Address(int(digits, 16))
            if not address6.is_link_local:
                interfaces.append((name, str(address6)))
    return interfaces


def measure_time(
    compute: Callable[[], object], min_duration_s: float, *, num_warm_ups: int = 1, min_count: int = 2
) -> tuple[float, int]:
    """Return the mean seconds of `compute` over at least `min_duration_s`, and how often it ran.

    The mean rather than the median: a machine limited to a share of a core works in bursts, where most steps
    are fast and a few take all the time.
    """
    for _ in range(num_warm_ups):
        compute()
    started, count, elapsed_s = time.perf_counter(), 0, 0.0
    while count < min_count or elapsed_s < min_duration_s:
        compute()
        count += 1
        elapsed_s = time.perf_counter() - started
    return elapsed_s / count, count
