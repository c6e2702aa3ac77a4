"""Processes of the sandbox, read from /proc."""

import contextlib
import os
import signal
from collections.abc import Iterator


def list_descendants() -> list[int]:
    """Return the processes of the sandbox: orphans become children of this process."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in _list_processes():
        children.setdefault(parent, []).append(pid)
    found = [os.getpid()]
    for parent in found:  # grows during the iteration
        found += children.get(parent, [])
    return found[1:]


def list_group(group: int) -> list[int]:
    """Return the processes of a process group."""
    return [pid for pid, _, found in _list_processes() if found == group]


def end_all() -> None:
    """Kill the sandbox's processes, also those that start meanwhile."""
    while found := list_descendants():
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _list_processes() -> Iterator[tuple[int, int, int]]:
    """Yield the number, parent and group of every process."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(") ")[2].split()
            yield int(pid), int(fields[1]), int(fields[2])
