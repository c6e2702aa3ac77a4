"""The processes of this machine, as /proc describes them."""

import contextlib
import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass

_PIDFD_GETFD = 438
"""System call number of pidfd_getfd(2) on every architecture; Linux 5.6 or newer."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc/PID/stat; `start_time` in clock ticks since boot."""

    name: str
    """The short name of the program."""
    state: str
    parent: int
    group: int
    session: int
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
    parent, group, session = map(int, fields[1:4])
    name = text[text.index("(") + 1 : text.rindex(")")]
    return ProcessStat(name, fields[0], parent, group, session, children_cpu_s, int(fields[19]))


def load_stat(pid: int) -> ProcessStat | None:
    """Return the state of process `pid`, or None if it does not exist."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat", errors="replace") as file:
        return parse_stat(file.read())
    return None


def load_all() -> dict[int, ProcessStat]:
    """Return the state of every process by its id."""
    stats = {int(name): load_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat}


def duplicate_descriptor(process: int, descriptor: int) -> int:
    """Duplicate a file descriptor of the process with the pidfd `process` into this one; raises OSError."""
    duplicate: int = _LIBC.syscall(
        ctypes.c_long(_PIDFD_GETFD), ctypes.c_int(process), ctypes.c_int(descriptor), ctypes.c_uint(0)
    )
    if duplicate < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return duplicate


def find_descendants(pid: int, stats: Mapping[int, ProcessStat]) -> list[int]:
    """Return all descendants of `pid` among `stats`, parents before children."""
    found = [pid]
    for known in found:  # grows during the iteration
        found += [child for child, stat in stats.items() if stat.parent == known]
    return found[1:]
