"""Hard limits of processes: what a training needs of each, and which of them an error is due to."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

FILES, FILES_PER_NODE = 32, 8
"""Open files that a process needs for itself, and on the host for each node."""
_MEMORY = "MemoryError|bad_alloc|Cannot allocate memory|failed to map segment|can't start new thread"
LIMITS = {
    "open files": ("`ulimit -n`", "Too many open files"),
    "processes": ("`ulimit -u` or pids.max", "new thread|annot fork|Resource temporarily unavailable"),
    "file size": ("`ulimit -f`", "File too large"),
    "address space": ("`ulimit -v`", _MEMORY),
    "data size": ("`ulimit -d`", _MEMORY),
    "stack size": ("`ulimit -s`", "$^"),
    "cpu time": ("`ulimit -t`", "$^"),
}
"""By name in /proc/PID/limits: what shows the limit, and what errors say that it causes. Sizes are in KiB."""
RAISE = (
    "raise it on that machine, where it is set: in a start-up file of the shell, /etc/security/limits.conf, "
    "or the unit or container of its SSH server"
)


def judge_limits(limits: Mapping[str, int], num_cores: int, num_nodes: int = 0) -> tuple[str, str, bool]:
    """Return which of `limits` are below what a small model needs, what it needs, and whether it must fail.

    Measured with TensorFlow 2.21. `num_nodes`: of the fleet, on the host. `processes` are threads.
    """
    needed = {
        "open files": FILES + FILES_PER_NODE * num_nodes,
        "processes": 24 + num_cores + 20 * num_nodes,
        "file size": 4 << 10,
        "address space": 1400 + 16 * num_cores + 64 * num_nodes << 10,
        "data size": 340 + 12 * num_cores << 10,
        "stack size": 128,
        "cpu time": 24 * 3600,
    }
    low = {name: value for name, value in limits.items() if value < needed.get(name, 0)}
    expected = ", ".join(str(needed[name]) for name in low)
    return describe_limits(low), expected, bool(low.keys() - {"cpu time"})


def describe_limits(limits: Mapping[str, int]) -> str:
    """Return limits with what shows them."""
    return ", ".join(f"{name} {value} ({LIMITS[name][0]})" for name, value in limits.items())


def parse_process_limits(text: str) -> dict[str, int]:
    """Return the hard limits in /proc/PID/limits, and how many processes each cgroup still allows."""
    rows = re.findall(r"^Max (\S+ \S+|processes) +\S+ +(\d+) +(bytes|)", text, re.MULTILINE)
    limits = {name: int(value) >> 10 * bool(unit) for name, value, unit in rows if name in LIMITS}
    for most, used in re.findall(r"^pids.max (\d+)\npids.current (\d+)$", text, re.MULTILINE):
        limits["processes"] = max(0, min(limits.get("processes", int(most)), int(most) - int(used)))
    return limits


def own_limits() -> dict[str, int]:
    """Return the limits of this process."""
    return parse_process_limits(Path("/proc/self/limits").read_text())


def explain_error(text: str) -> str:
    """Return which limits of this process an error with this text is most likely due to. '' if none."""
    suspects = {name: value for name, value in own_limits().items() if re.search(LIMITS[name][1], text)}
    if not os.getuid():
        suspects.pop("processes", None)  # the kernel does not count the processes of root
    limits = judge_limits(suspects, num_cores=1)[0] or describe_limits(suspects)
    return f", most likely due to a limit there: {limits}" if suspects else ""
