"""End and remove what a session of tests leaves, however pytest ends.

    python -m tests.reaper DIRECTORY PID

When pytest, PID, is done (standard input ends) or gone, it kills the processes that have the session in
their environment, and removes the session's emulated fleets, labs, mounts, files in /dev/shm and, unless it
is to be kept, DIRECTORY.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from csdctl.emulation.fleet import FleetPaths, remove_fleet
from csdctl.emulation.limits import list_ancestors, start_time
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.private import SHARED_MEMORY
from tests.session import KEPT, VARIABLE

END_S = 30.0


def wait_until_over(pytest_pid: int) -> None:
    """Return when pytest is done or gone."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN | select.POLLHUP)
    with contextlib.suppress(ProcessLookupError):
        waiting.register(os.pidfd_open(pytest_pid), select.POLLIN)
        waiting.poll()


def kill_all(directory: Path, pytest_pid: int) -> None:
    """Kill what is left until nothing is, except pytest itself."""
    spared = {*list_ancestors(os.getpid()), *list_ancestors(pytest_pid)}
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s:
        remaining = list_marked(directory) - spared
        if not remaining:
            return
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    print(f"tests: these processes do not end: {sorted(remaining)}", file=sys.stderr)


def list_marked(directory: Path) -> set[int]:
    """Return the processes that have the session in their environment."""
    mark = f"{VARIABLE}={directory}".encode()
    pids = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and start_time(int(entry.name)):
                pids.add(int(entry.name))
    return pids


def remove_all(directory: Path) -> None:
    """Remove fleets, step files, labs, mounts and the session's directory."""
    if os.geteuid() == 0:  # first, for what is mounted cannot be removed
        unmount_below(directory)
    # Unlike rglob, os.walk goes on where a directory disappears: a process that was killed had it in use.
    for project in [Path(at) for at, names, _ in os.walk(directory) if ".csdctl" in names]:
        if (project / ".csdctl/emulated/fleet.id").exists():
            remove_fleet(FleetPaths(project / ".csdctl/emulated"))
        remove_step_files(project)
    if os.geteuid() == 0:
        from tests.lab.lab import remove_stale_labs

        remove_stale_labs()
    if not (directory / KEPT).exists():
        shutil.rmtree(directory, ignore_errors=True)


def remove_step_files(project: Path) -> None:
    """Remove what the runs of `project` keep in the machine's memory, whoever trained."""
    example = ProjectDirectory(project).step_file(RunDirectory(Path("RUN")))
    for path in SHARED_MEMORY.glob(f"csdctl-*/{example.name.removesuffix('RUN')}*"):
        path.unlink(missing_ok=True)


def unmount_below(directory: Path) -> None:
    """Unmount what tests have mounted below `directory`, the last first."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in reversed(mounts):
        if Path(place).is_relative_to(directory):
            subprocess.run(["umount", "--lazy", place], check=False)


def main(directory: Path, pytest_pid: int) -> None:
    """Wait for the end of pytest, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait_until_over(pytest_pid)
    kill_all(directory, pytest_pid)
    remove_all(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
