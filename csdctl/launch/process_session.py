"""Processes of one POSIX session, read from /proc: mpirun, its agents and local ranks."""

import contextlib
import os
import signal
from pathlib import Path


def kill_session(session_id: int) -> None:
    """Kill every process of a session."""
    for pid in list_session_pids(session_id):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def list_session_pids(session_id: int) -> list[int]:
    """Return the processes of a session (field 6 of /proc/PID/stat)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[3]) == session_id:
                found.append(int(stat.parent.name))
    return found


def read_program_name(pid: int) -> str:
    """Return the name of the program that process `pid` runs; '' when the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
