"""End and remove what a session of tests leaves, however pytest ends.

    python -m tests.reaper DIRECTORY PID

It looks at the descendants of pytest, PID, twice a second, because those whose parent has ended are nobody's
descendants any more. When pytest is done (standard input ends) or gone, it kills those that are left, and
removes the session's emulated fleets, labs, mounts, files in /dev/shm and, unless it is to be kept,
DIRECTORY.
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
from csdctl.emulation.limits import list_ancestors, list_descendants, start_time
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.private import SHARED_MEMORY
from tests.session import KEPT, VARIABLE

LOOK_S = 0.5
END_S = 30.0


class Reaper:
    """Knows the processes of one session."""

    def __init__(self, directory: Path, pytest_pid: int) -> None:
        self.directory = directory
        self.pytest_pid = pytest_pid
        self.known: dict[int, int] = {}
        """Start times by pid."""
        self.places: set[Path] = set()
        """Where they worked. pytest may have removed the directory of a project by the end."""

    def look(self) -> None:
        """Learn the descendants that are there now, of pytest and of those that were known."""
        running = {pid: started for pid, started in self.known.items() if start_time(pid) == started}
        seen = set(list_descendants(self.pytest_pid))
        for root in running:
            if root not in seen:  # its parent has ended
                seen |= {root, *list_descendants(root)}
        self.known = running | {
            pid: at for pid in seen - running.keys() if (at := start_time(pid)) is not None
        }
        for pid in self.known:
            with contextlib.suppress(OSError):
                self.places.add(Path(os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)")))

    def wait(self) -> None:
        """Return when pytest is done or gone."""
        waiting = select.poll()
        waiting.register(0, select.POLLIN | select.POLLHUP)
        with contextlib.suppress(ProcessLookupError):
            waiting.register(os.pidfd_open(self.pytest_pid), select.POLLIN)
            while not waiting.poll(LOOK_S * 1000):
                self.look()
        self.look()

    def kill_all(self) -> None:
        """Kill what is left until nothing is, except pytest itself."""
        spared = {*list_ancestors(os.getpid()), *list_ancestors(self.pytest_pid)}
        end_s = time.monotonic() + END_S
        while time.monotonic() < end_s:
            self.look()
            remaining = {*self.known, *self._marked()} - spared
            if not remaining:
                return
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        print(f"tests: these processes do not end: {sorted(remaining)}", file=sys.stderr)

    def _marked(self) -> set[int]:
        """Return the processes that have the session in their environment."""
        mark = f"{VARIABLE}={self.directory}".encode()
        pids = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and start_time(int(entry.name)):
                    pids.add(int(entry.name))
        return pids

    def remove_all(self) -> None:
        """Remove fleets, step files, labs, mounts and the session's directory."""
        # Unlike rglob, os.walk goes on where a directory disappears: a process that was killed had it in use.
        projects = [Path(at) for at, names, _ in os.walk(self.directory) if ".csdctl" in names]
        for project in projects:
            if (project / ".csdctl/emulated/fleet.id").exists():
                remove_fleet(FleetPaths(project / ".csdctl/emulated"))
        for project in {*projects, *self.places}:
            remove_step_files(project)
        if os.geteuid() == 0:
            from tests.lab.lab import remove_stale_labs

            remove_stale_labs()
            unmount_below(self.directory)
        if not (self.directory / KEPT).exists():
            shutil.rmtree(self.directory, ignore_errors=True)


def remove_step_files(project: Path) -> None:
    """Remove what the runs of `project` keep in the machine's memory, whoever trained."""
    example = ProjectDirectory(project).step_file(RunDirectory(Path("RUN")))
    for path in SHARED_MEMORY.glob(f"csdctl-*/{example.name.removesuffix('RUN')}*"):
        path.unlink(missing_ok=True)
    for directory in SHARED_MEMORY.glob("csdctl-*"):
        with contextlib.suppress(OSError):
            directory.rmdir()  # only an empty one; csdctl makes it again


def unmount_below(directory: Path) -> None:
    """Unmount what tests have mounted below `directory`, the last first."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in reversed(mounts):
        if Path(place).is_relative_to(directory):
            subprocess.run(["umount", "--lazy", place], check=False)


def main() -> None:
    """Wait for the end of pytest, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reaper = Reaper(Path(sys.argv[1]), int(sys.argv[2]))
    reaper.wait()
    reaper.kill_all()
    reaper.remove_all()


if __name__ == "__main__":
    main()
