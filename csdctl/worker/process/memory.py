"""Memory of this process."""

import mmap
import resource
from pathlib import Path


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
    wanted = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
