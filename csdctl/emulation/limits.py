"""The processes of a node, as /proc describes them, and their limits: a share of the CPU, and memory.

The CPU is limited by control groups, where they are writable, or by stopping processes. A shell moves itself
into the group before it becomes a command, so that no child is outside.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import threading
import time
from functools import cache
from pathlib import Path

from csdctl.errors import CsdctlError
from csdctl.worker.protocol.processes import find_descendants, load_all, load_stat, send_signal

FLEET_VARIABLE = "CSDCTL_EMULATED_FLEET"
NODE_VARIABLE = "CSDCTL_EMULATED_NODE"
PERIOD_US = 6_000
"""A short period of control groups gives steady step times: at a quarter of a core, 1.5 ms of every 6 ms.

With 20 ms, a step of 70 ms varies by up to 15 ms, and all ranks wait for the slowest.
"""
MIN_QUOTA_US = 1_000
"""The minimum that the kernel accepts."""
PERIOD_S = 0.020
"""The time between two checks of a duty cycle."""
MAX_STOP_S = 0.5
"""Limits the debt, for instance after a late check: a node that stops for seconds is considered dead."""
log = logging.getLogger(__name__)


def start_time(pid: int) -> int | None:
    """Return the start time of `pid` in clock ticks since boot. None if it has ended."""
    stat = load_stat(pid)
    return None if stat is None or stat.has_ended else stat.start_time


def is_running(pid: int, started: int) -> bool:
    """Return whether process `pid` with start time `started` still runs."""
    return start_time(pid) == started


def list_children(pid: int) -> list[int]:
    """Return the pids of the children of `pid`, including zombies."""
    if not _has_children_files():
        return [child for child, stat in load_all().items() if stat.parent == pid]
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, _load(f"/proc/{pid}/task/{thread}/children").split())
    return pids


def list_descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of `pid`, parents before children."""
    if not _has_children_files():
        return find_descendants(pid, load_all())
    descendants = list_children(pid)
    for child in descendants:  # grows during the iteration
        descendants += list_children(child)
    return descendants


def list_marked(fleet_id: str) -> list[int]:
    """Return the pids with the marker of the emulated fleet in their environment."""
    mark = f"{FLEET_VARIABLE}={fleet_id}".encode()
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                pids.append(int(name))
    return pids


def list_ancestors(pid: int) -> list[int]:
    """Return `pid`, its parent, and so on up to process 1."""
    pids: list[int] = []
    while pid > 0:
        pids.append(pid)
        stat = load_stat(pid)
        pid = stat.parent if stat else 0
    return pids


def cpu_time_s(pid: int) -> float:
    """Return the CPU seconds of all threads of `pid`, to the nanosecond. 0 if it has ended."""
    # The same number as clock_getcpuclockid(3), which Python only has for threads.
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def anonymous_bytes(pid: int, *, is_divided: bool = False) -> int:
    """Return the memory of `pid` without a file, 0 if ended. `is_divided`: shared pages in equal parts."""
    lines = _load(f"/proc/{pid}/{'smaps_rollup' if is_divided else 'status'}").splitlines()
    names = ("RssAnon:", "RssShmem:", "Pss_Anon:", "Pss_Shmem:")
    num_bytes = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))
    return num_bytes or (anonymous_bytes(pid) if is_divided else 0)  # before Linux 5.9 it is not known


def _load(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""  # the process ended meanwhile


@cache
def _has_children_files() -> bool:
    """Return whether the kernel lists children (CONFIG_PROC_CHILDREN), far cheaper than reading /proc."""
    return os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


class CgroupLimit:
    """One node's control group. Created by `open_cgroup`. `close` ends its processes and removes it."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.mechanism = f"cgroup-v{version}"

    def build_command(self, command: list[str]) -> list[str]:
        """Return the argument list that runs `command` inside the group."""
        enter = 'echo 0 > "$0" || exit 125; exec "$@"'
        return ["/bin/sh", "-c", enter, str(self.path / "cgroup.procs"), *command]

    def close(self) -> None:
        """End every process in the group and remove it."""
        remove_cgroup(self.path)


def plan_quota(cpu: float) -> tuple[int, int]:
    """Return (quota, period) in microseconds for `cpu` cores."""
    period_us = max(PERIOD_US, int(MIN_QUOTA_US / cpu))
    return max(MIN_QUOTA_US, round(cpu * period_us)), period_us


def open_cgroup(name: str, cpu: float) -> CgroupLimit | None:
    """Create a control group limited to `cpu` cores. Return None if that is impossible."""
    if not (hierarchy := find_hierarchy()):
        return None
    version, root = hierarchy
    of_process = Path(root, parse_own_group(Path("/proc/self/cgroup").read_text(), version))
    # Its own group first: parents may belong to another user. A container may hide groups above its own.
    for parent in (of_process, *of_process.parents):
        if parent.is_relative_to(root) and _create(parent / name, version, cpu):
            return CgroupLimit(parent / name, version)
    return None


def find_hierarchy() -> tuple[int, Path] | None:
    """Return version and root of the control groups with the CPU controller, at their usual mount point."""
    usual = ((2, "/sys/fs/cgroup", "cgroup.controllers"), (1, "/sys/fs/cgroup/cpu", "cgroup.procs"))
    return next(((version, Path(root)) for version, root, file in usual if Path(root, file).exists()), None)


def parse_own_group(own_cgroups: str, version: int) -> str:
    """Return the path of this process's group below the root, from /proc/self/cgroup."""
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") if version == 1 else not controllers:
            return path.lstrip("/")
    return ""


def list_cgroups(prefix: str) -> list[Path]:
    """Return all control groups of the CPU controller with a name that starts with `prefix`."""
    hierarchy = find_hierarchy()
    walked = os.walk(hierarchy[1]) if hierarchy else ()
    return [
        Path(place, child) for place, children, _ in walked for child in children if child.startswith(prefix)
    ]


def list_members(path: Path) -> list[int]:
    """Return the pids in the control group `path`."""
    return [int(pid) for pid in _load(str(path / "cgroup.procs")).split()]


def remove_cgroup(path: Path) -> None:
    """End every process in the control group and remove it. Raises CsdctlError on failure."""
    deadline = time.monotonic() + 5.0
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
    try:
        path.mkdir()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        quota_us, period_us = plan_quota(cpu)
        if version == 1:
            (path / "cpu.cfs_period_us").write_text(str(period_us))
            (path / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            if not (path / "cpu.max").exists():
                (path.parent / "cgroup.subtree_control").write_text("+cpu")
            (path / "cpu.max").write_text(f"{quota_us} {period_us}")
        trial = [*CgroupLimit(path, version).build_command(["true"])]
        if subprocess.run(trial, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return True
    remove_cgroup(path)
    return False


class DutyCycle:
    """Limit the descendants of process `root_pid` (this process) to `cpu` cores, in a thread, unprivileged.

    Time adds the node's share of CPU seconds to a bucket. The CPU time of the node's processes drains it.
    Processes are stopped when the bucket is empty, and continued when it has the share of a period again, so
    that an idle node is never stopped. Processes that others have stopped stay stopped.
    """

    mechanism = "duty"

    def __init__(self, root_pid: int, cpu: float) -> None:
        self._root_pid = root_pid
        self._cpu = cpu
        self._tokens_s = 0.0
        self._used_s = self._measure_used_s([])
        self._then = time.monotonic()
        self._stopped: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duty cycle", daemon=True)
        self._thread.start()

    def build_command(self, command: list[str]) -> list[str]:
        """Return `command` unchanged: descendants are found automatically."""
        return command

    def close(self) -> None:
        """End the thread and continue all stopped processes."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while not self._ended.wait(pause_s):
                try:
                    pause_s = self._step(time.monotonic())
                except Exception:  # a single failed read of /proc must not lift the limit
                    log.exception("duty cycle")
                    pause_s = PERIOD_S
        finally:
            self._resume()

    def _step(self, now: float) -> float:
        """Check the node once. Return the seconds until the next check."""
        pids = list_descendants(self._root_pid)
        # A process that is being reaped is missing for a moment: the sum never really decreases.
        used_s = max(self._used_s, self._measure_used_s(pids))
        spent_s, share_s = used_s - self._used_s, self._cpu * PERIOD_S
        filled_s = min(1.5 * share_s, self._tokens_s + self._cpu * (now - self._then))
        self._tokens_s = max(-MAX_STOP_S * self._cpu, filled_s - spent_s)
        self._used_s, self._then = used_s, now
        if self._tokens_s <= 0:
            self._stop(pids)
            return (share_s - self._tokens_s) / self._cpu
        self._resume()
        if not pids:
            return 0.100  # CPU time used meanwhile is charged later
        if not spent_s:
            return PERIOD_S
        # All cores may work for this node: check again when they could have used up the bucket.
        return min(PERIOD_S, max(0.002, self._tokens_s / (os.cpu_count() or 1)))

    def _measure_used_s(self, pids: list[int]) -> float:
        """Return the CPU seconds of the node so far, of running and ended processes."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = ended.ru_utime + ended.ru_stime
        for pid in pids:
            stat = load_stat(pid)
            used_s += cpu_time_s(pid) + (stat.children_cpu_s if stat else 0.0)
        return used_s

    def _stop(self, pids: list[int]) -> None:
        running = self._stoppable(pids)
        while running:  # includes processes forked before their parent was stopped
            send_signal(running, signal.SIGSTOP)
            self._stopped |= running
            running = self._stoppable(list_descendants(self._root_pid))

    def _stoppable(self, pids: list[int]) -> set[int]:
        stats = {pid: load_stat(pid) for pid in set(pids) - self._stopped}
        return {pid for pid, stat in stats.items() if stat and stat.state not in "ZXTt"}

    def _resume(self) -> None:
        stopped, self._stopped = self._stopped, set()
        with contextlib.suppress(OSError):
            send_signal(stopped, signal.SIGCONT)


def cgroup_prefix(fleet_id: str) -> str:
    """Return the prefix of the control groups of a fleet."""
    return f"csdctl-{fleet_id}-"


async def watch_memory(limit_bytes: int) -> None:
    """Limit the descendants of this process to `limit_bytes` of anonymous memory. Never returns."""
    while True:
        await asyncio.sleep(0.25)
        pids = list_descendants(os.getpid())
        if sum(map(anonymous_bytes, pids)) > limit_bytes:
            end_largest_above(limit_bytes, {pid: anonymous_bytes(pid, is_divided=True) for pid in pids})


def end_largest_above(limit_bytes: int, used_bytes: dict[int, int]) -> int | None:
    """If the processes exceed the limit together, kill the largest and return its pid."""
    total_bytes = sum(used_bytes.values())
    if total_bytes <= limit_bytes:
        return None
    largest = max(used_bytes, key=lambda pid: used_bytes[pid])
    stat = load_stat(largest)
    sizes = used_bytes[largest] >> 20, total_bytes >> 20, limit_bytes >> 20
    text = "out of memory: killed %s (pid %d, %d MiB); the node uses %d of %d MiB"
    log.warning(text, stat.name if stat else "", largest, *sizes)
    send_signal([largest], signal.SIGKILL)
    return largest
