"""CPU limits with the kernel's control groups, version 1 or 2, where they are writable.

A command is started by a shell that first moves itself into the group, so that no child can be outside. The
groups are named after the fleet, so that they can be found without a state file.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from csdctl.emulation.processes import send_signal
from csdctl.errors import CsdctlError

PERIOD_US = 6_000
"""A short period gives steady step times: at a quarter of a core, 1.5 ms of every 6 ms.

With 20 ms, a step of 70 ms varies by up to 15 ms, and all ranks wait for the slowest.
"""
MIN_QUOTA_US = 1_000
"""The minimum that the kernel accepts."""
REMOVAL_DEADLINE_S = 5.0

_ENTER = 'echo 0 > "$0" || exit 125; exec "$@"'


@dataclass(frozen=True)
class CpuHierarchy:
    """The mount point of the kernel's CPU controller, and the group of this process."""

    version: int
    mount: Path
    own: Path


class CgroupLimit:
    """One node's control group. Created by `open_cgroup`; `close` ends its processes and removes it."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.mechanism = f"cgroup-v{version}"

    def build_command(self, command: list[str]) -> list[str]:
        """Return the argument list that runs `command` inside the group."""
        return ["/bin/sh", "-c", _ENTER, str(self.path / "cgroup.procs"), *command]

    def close(self) -> None:
        """End every process in the group and remove it."""
        remove_cgroup(self.path)


def plan_quota(cpu: float) -> tuple[int, int]:
    """Return (quota, period) in microseconds for `cpu` cores."""
    period_us = max(PERIOD_US, int(MIN_QUOTA_US / cpu))
    return max(MIN_QUOTA_US, round(cpu * period_us)), period_us


def open_cgroup(name: str, cpu: float) -> CgroupLimit | None:
    """Create a control group limited to `cpu` cores; return None if that is impossible."""
    for hierarchy in find_hierarchies():
        # The own group first: parents may belong to another user.
        for parent in (hierarchy.own, *hierarchy.own.parents):
            if not parent.is_relative_to(hierarchy.mount):
                break
            if _create(parent / name, hierarchy.version, cpu):
                return CgroupLimit(parent / name, hierarchy.version)
    return None


def find_hierarchies() -> list[CpuHierarchy]:
    """Return the mounted hierarchies that may have a CPU controller, version 1 first."""
    try:
        return parse_hierarchies(
            Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        )
    except OSError:
        return []


def parse_hierarchies(mountinfo: str, own_cgroups: str) -> list[CpuHierarchy]:
    """Parse /proc/self/mountinfo and /proc/self/cgroup."""
    own = {}
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        (root, mount), (fs_type, _, options) = left.split()[3:5], right.split(maxsplit=2)
        is_v1 = fs_type == "cgroup" and "cpu" in options.split(",")
        if is_v1 or fs_type == "cgroup2":
            path = os.path.relpath(own.get("cpu" if is_v1 else "", "/"), root)
            place = Path(mount) if path.startswith("..") else Path(mount, path)
            found.append(CpuHierarchy(1 if is_v1 else 2, Path(mount), place))
    return sorted(found, key=lambda hierarchy: hierarchy.version)


def list_cgroups(prefix: str) -> list[Path]:
    """Return all control groups in the CPU hierarchies with a name that starts with `prefix`."""
    found = []
    for hierarchy in find_hierarchies():
        for directory, children, _ in os.walk(hierarchy.mount):
            found += [Path(directory, child) for child in children if child.startswith(prefix)]
    return found


def list_members(path: Path) -> list[int]:
    """Return the pids in the control group `path`."""
    try:
        return [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def remove_cgroup(path: Path) -> None:
    """End every process in the control group and remove it; raises CsdctlError on failure."""
    deadline = time.monotonic() + REMOVAL_DEADLINE_S
    while path.exists():
        send_signal(list_members(path), signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):
            try:
                path.rmdir()
            except OSError as error:  # its processes are still ending
                if time.monotonic() > deadline:
                    raise CsdctlError(
                        f"the control group {path} cannot be removed: {error.strerror}",
                        remedy="end its processes (cgroup.procs), then run `csdctl emulate down` again",
                    ) from None
                time.sleep(0.02)


def _create(path: Path, version: int, cpu: float) -> bool:
    """Create the group, set its share and try to enter it; remove it on failure."""
    try:
        path.mkdir()
    except OSError:
        return False
    try:
        for file, content in _settings(path, version, cpu):
            file.write_text(content)
        trial = [*CgroupLimit(path, version).build_command(["true"])]
        if subprocess.run(trial, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return True
    except OSError:
        pass
    remove_cgroup(path)
    return False


def _settings(path: Path, version: int, cpu: float) -> Iterator[tuple[Path, str]]:
    quota_us, period_us = plan_quota(cpu)
    if version == 1:
        yield path / "cpu.cfs_period_us", str(period_us)
        yield path / "cpu.cfs_quota_us", str(quota_us)
        return
    if not (path / "cpu.max").exists():
        yield path.parent / "cgroup.subtree_control", "+cpu"
    yield path / "cpu.max", f"{quota_us} {period_us}"
