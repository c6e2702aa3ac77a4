"""Read /proc: the processes of a node and their resource usage; send signals.

A process is identified by its pid and start time, so that a reused pid is never mistaken for it. A zombie
counts as ended.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from functools import cache

from csdctl.worker.protocol.processes import find_descendants, load_all, load_stat

FLEET_VARIABLE = "CSDCTL_EMULATED_FLEET"
NODE_VARIABLE = "CSDCTL_EMULATED_NODE"


def start_time(pid: int) -> int | None:
    """Return the start time of `pid` in clock ticks since boot; None if it has ended."""
    stat = load_stat(pid)
    return None if stat is None or stat.has_ended else stat.start_time


def is_running(pid: int, started: int) -> bool:
    """Return whether process `pid` with start time `started` still runs."""
    return start_time(pid) == started


def list_children(pid: int) -> list[int]:
    """Return the pids of the children of `pid`, including zombies."""
    if not _has_children_files():
        return [child for child, stat in load_all().items() if stat.parent == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _load(f"/proc/{pid}/task/{thread}/children").split())
    return found


def list_descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of `pid`, parents before children."""
    if not _has_children_files():
        return find_descendants(pid, load_all())
    found = list_children(pid)
    for child in found:  # grows during the iteration
        found += list_children(child)
    return found


def list_marked(fleet_id: str) -> list[int]:
    """Return the pids with the marker of the emulated fleet in their environment."""
    mark = f"{FLEET_VARIABLE}={fleet_id}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                found.append(int(name))
    return found


def list_ancestors(pid: int) -> list[int]:
    """Return `pid`, its parent, and so on up to process 1."""
    found: list[int] = []
    while pid > 0:
        found.append(pid)
        stat = load_stat(pid)
        pid = stat.parent if stat else 0
    return found


def cpu_time_s(pid: int) -> float:
    """Return the CPU seconds of all threads of `pid`, to the nanosecond; 0 if it has ended."""
    # The same number as clock_getcpuclockid(3), which Python only has for threads.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def anonymous_bytes(pid: int) -> int:
    """Return the memory of `pid` without a backing file (RssAnon + RssShmem), in bytes; 0 if ended."""
    return sum(
        int(line.split()[1]) << 10
        for line in _load(f"/proc/{pid}/status").splitlines()
        if line.startswith(("RssAnon:", "RssShmem:"))
    )


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those of `pids` that exist and belong to this user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _load(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # the process ended meanwhile
        return ""


@cache
def _has_children_files() -> bool:
    """Return whether the kernel lists children (CONFIG_PROC_CHILDREN), far cheaper than reading /proc."""
    return os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
