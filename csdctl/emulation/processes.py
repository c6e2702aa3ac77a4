"""Read /proc: the processes of a node and their resource usage; send signals.

A process is identified by its pid and start time, so that a reused pid is never mistaken for it. A zombie
counts as ended.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

FLEET_VARIABLE = "CSDCTL_EMULATED_FLEET"
NODE_VARIABLE = "CSDCTL_EMULATED_NODE"

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc/PID/stat; `start_time` in clock ticks since boot."""

    state: str
    parent: int
    group: int
    children_cpu_s: float
    """CPU time of the children that were reaped."""
    start_time: int

    @property
    def has_ended(self) -> bool:
        """Whether it is a zombie: ended, but not reaped."""
        return self.state in "ZX"


def parse_stat(text: str) -> ProcessStat:
    """Parse the content of /proc/PID/stat; the process name may contain spaces and brackets."""
    fields = text[text.rindex(")") + 2 :].split()
    children_cpu_s = (int(fields[13]) + int(fields[14])) / _TICKS_PER_S
    return ProcessStat(fields[0], int(fields[1]), int(fields[2]), children_cpu_s, int(fields[19]))


def load_stat(pid: int) -> ProcessStat | None:
    """Return the state of process `pid`, or None if it does not exist."""
    text = _load(f"/proc/{pid}/stat")
    return parse_stat(text) if text else None


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
        return [child for child, parent in _parents().items() if parent == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _load(f"/proc/{pid}/task/{thread}/children").split())
    return found


def list_descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of `pid`, parents before children."""
    if not _has_children_files():
        return _descendants_in(_parents(), pid)
    found = list_children(pid)
    for child in found:  # grows during the iteration
        found += list_children(child)
    return found


def list_marked(fleet_id: str) -> list[int]:
    """Return the pids with the marker of the emulated fleet in their environment."""
    mark = f"{FLEET_VARIABLE}={fleet_id}".encode()
    found = []
    for pid in _all_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                found.append(pid)
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


def process_name(pid: int) -> str:
    """Return the short name of `pid`, or '' if it has ended."""
    return _load(f"/proc/{pid}/comm").strip()


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


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parents() -> dict[int, int]:
    stats = {pid: load_stat(pid) for pid in _all_pids()}
    return {pid: stat.parent for pid, stat in stats.items() if stat}


def _descendants_in(parents: dict[int, int], pid: int) -> list[int]:
    found = [child for child, parent in parents.items() if parent == pid]
    for known in found:  # grows during the iteration
        found += [child for child, parent in parents.items() if parent == known]
    return found
