"""Reading /proc: which processes belong to a node, what they use, and ending them.

A process is named by its pid and its start time together, so that a recycled pid is never taken
for the one that was meant. A zombie counts as ended.
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
    """What /proc/PID/stat says; `start_time` in clock ticks since boot."""

    state: str
    parent: int
    group: int
    children_cpu_s: float
    """CPU time of the children that ended and were waited for."""
    start_time: int

    @property
    def has_ended(self) -> bool:
        """True for a zombie: it runs no more, only its exit code is left."""
        return self.state in "ZX"


def parse_stat(text: str) -> ProcessStat:
    """Read the content of /proc/PID/stat; the name in it may hold spaces and brackets."""
    fields = text[text.rindex(")") + 2 :].split()
    children_cpu_s = (int(fields[13]) + int(fields[14])) / _TICKS_PER_S
    return ProcessStat(fields[0], int(fields[1]), int(fields[2]), children_cpu_s, int(fields[19]))


def load_stat(pid: int) -> ProcessStat | None:
    """The state of process `pid`, or None when there is none."""
    text = _load(f"/proc/{pid}/stat")
    return parse_stat(text) if text else None


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None when it has ended."""
    stat = load_stat(pid)
    return None if stat is None or stat.has_ended else stat.start_time


def is_running(pid: int, started: int) -> bool:
    """Whether the process that was `pid` at `started` still runs."""
    return start_time(pid) == started


def list_children(pid: int) -> list[int]:
    """The pids of the direct children of `pid`, zombies among them."""
    if not _has_children_files():
        return [child for child, parent in _parents().items() if parent == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _load(f"/proc/{pid}/task/{thread}/children").split())
    return found


def list_descendants(pid: int) -> list[int]:
    """The pids of all processes below `pid`, parents before children."""
    if not _has_children_files():
        return _descendants_in(_parents(), pid)
    found = list_children(pid)
    for child in found:  # grows while it is walked
        found += list_children(child)
    return found


def list_carriers(fleet_id: str) -> list[int]:
    """The pids that carry the mark of the emulated fleet in their environment."""
    mark = f"{FLEET_VARIABLE}={fleet_id}".encode()
    found = []
    for pid in _all_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                found.append(pid)
    return found


def list_ancestors(pid: int) -> list[int]:
    """`pid`, its parent, and so on up to the first process."""
    found: list[int] = []
    while pid > 0:
        found.append(pid)
        stat = load_stat(pid)
        pid = stat.parent if stat else 0
    return found


def cpu_time_s(pid: int) -> float:
    """CPU seconds of all threads of `pid`, to the nanosecond; 0 when it is gone."""
    # clock_getcpuclockid(3) makes this same number; Python has it for threads only.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def anonymous_bytes(pid: int) -> int:
    """Memory of `pid` that no file backs (RssAnon + RssShmem), in bytes; 0 when it is gone."""
    return sum(
        int(line.split()[1]) << 10
        for line in _load(f"/proc/{pid}/status").splitlines()
        if line.startswith(("RssAnon:", "RssShmem:"))
    )


def process_name(pid: int) -> str:
    """The short name of `pid`, or '' when it is gone."""
    return _load(f"/proc/{pid}/comm").strip()


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those of `pids` that are there and ours."""
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
    """Whether the kernel lists children (CONFIG_PROC_CHILDREN): far cheaper than reading all of /proc."""
    return os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parents() -> dict[int, int]:
    stats = {pid: load_stat(pid) for pid in _all_pids()}
    return {pid: stat.parent for pid, stat in stats.items() if stat}


def _descendants_in(parents: dict[int, int], pid: int) -> list[int]:
    found = [child for child, parent in parents.items() if parent == pid]
    for known in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == known]
    return found
