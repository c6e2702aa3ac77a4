"""Stop an emulated fleet, and remove it in any state.

Its processes are found even if its state is lost: by the marker in their environment, and by the names of
control groups. A fleet may belong to a process: one of its own processes watches that, and then stops it.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from csdctl.emulation.limits import cgroup_prefix, list_cgroups, list_members, remove_cgroup
from csdctl.emulation.processes import (
    is_running,
    list_ancestors,
    list_marked,
    send_signal,
    start_time,
)
from csdctl.emulation.state import (
    FleetPaths,
    FleetState,
    Owner,
    is_unchanged,
    load_state,
    locked,
    remove_fleet_file,
    save_state,
)
from csdctl.errors import CsdctlError, InputError

GRACE_S = 5.0
DEADLINE_S = 10.0
CHECK_INTERVAL_S = 0.2


@dataclass(frozen=True)
class StoppedFleet:
    """Number of ended processes; `kept_fleet_path` is a fleet.yaml changed by the user."""

    num_processes: int = 0
    kept_fleet_path: Path | None = None


def stop_fleet(directory: Path, *, keep: bool = False) -> StoppedFleet:
    """End the fleet and remove everything of it, even after a crash; do nothing without a fleet.

    With `keep`, the files of its nodes, its keys and its fleet.yaml stay, and `start_fleet` uses them again.
    """
    paths = FleetPaths(directory)
    if not paths.directory.parent.exists():  # removed manually; its processes may still run
        return remove_fleet(paths)
    with locked(paths):
        if paths.is_foreign:
            raise InputError(
                f"{paths.directory} is not the directory of an emulated fleet; it is left unchanged"
            )
        state = load_state(paths)
        return keep_fleet(paths, state) if keep and state else remove_fleet(paths)


def keep_fleet(paths: FleetPaths, state: FleetState) -> StoppedFleet:
    """End every process of the fleet except this one; remove its control groups and temporary files."""
    ended = _end_processes(paths)
    _remove_short_tmp(paths)
    for link in (paths.short_tmp, *(paths.node(name).tmp for name in state.node_names)):
        link.unlink(missing_ok=True)
    save_state(paths, replace(state, nodes=(), owner=None, is_kept=True))
    return StoppedFleet(len(ended))


def remove_fleet(paths: FleetPaths) -> StoppedFleet:
    """End every process of the fleet except this one, and remove its control groups and files."""
    state = load_state(paths)
    ended = _end_processes(paths)
    candidates = [paths.default_fleet, paths.directory.parent.parent / "fleet.yaml"]  # without a state
    written = (
        [state.fleet_path] if state else [one for one in candidates if is_unchanged(one, paths.fleet_id)]
    )
    kept = [path for path in written if not remove_fleet_file(path, paths.fleet_id)]
    _remove_short_tmp(paths)
    if paths.is_ours:
        # The marker is removed last, so that an interrupted removal can be repeated.
        for entry in paths.directory.iterdir():
            if entry not in (paths.marker, paths.state):
                _remove_tree(entry)
        paths.state.unlink(missing_ok=True)
        paths.marker.unlink(missing_ok=True)
    if paths.directory.exists():
        paths.directory.rmdir()
    return StoppedFleet(len(ended), kept[0] if kept else None)


def _end_processes(paths: FleetPaths) -> set[int]:
    """End all processes with SIGTERM, then kill the rest, and remove their control groups.

    Returns the pids of all that were found.
    """
    own = set(list_ancestors(os.getpid()))
    ended: set[int] = set()

    def remaining() -> set[int]:
        found = set(list_marked(paths.fleet_id))
        for cgroup in list_cgroups(cgroup_prefix(paths.fleet_id)):
            found |= set(list_members(cgroup))
        found = {pid for pid in found - own if start_time(pid) is not None}
        ended.update(found)
        return found

    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, DEADLINE_S)):
        deadline, told = time.monotonic() + patience_s, set[int]()
        while (pids := remaining()) and time.monotonic() < deadline:
            send_signal(pids - told, number)
            send_signal(pids - told, signal.SIGCONT)  # a server that was killed may have left them stopped
            told |= pids
            time.sleep(0.02)
    if pids:
        raise CsdctlError(
            f"processes of the emulated fleet do not end: {sorted(pids)}",
            remedy="check them with `ps`, then run `csdctl emulate down` again",
        )
    for cgroup in list_cgroups(cgroup_prefix(paths.fleet_id)):
        remove_cgroup(cgroup)
    return ended


def _remove_short_tmp(paths: FleetPaths) -> None:
    """Remove the short TMPDIRs: the target of the link, and those with the fleet's name if it is lost."""
    linked = [paths.short_tmp.readlink()] if paths.short_tmp.is_symlink() else []
    named = Path(tempfile.gettempdir()).glob(f"{paths.short_tmp_prefix}*")
    for path in {*linked, *named}:
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
            _remove_tree(path)


def _remove_tree(path: Path) -> None:
    """Remove a file or a tree, including one with read-only directories."""
    if path.is_dir() and not path.is_symlink():
        subprocess.run(["chmod", "-R", "u+rwX", str(path)], check=False)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def find_owner(pid: int) -> Owner:
    """Return the running process `pid` as an owner; raises InputError if there is none."""
    started = start_time(pid) if pid > 0 else None
    if started is None:
        raise InputError(
            f"received {pid} as the process that the emulated fleet ends with, "
            "expected the id of a running process",
            remedy="pass one, such as --pid $$ for the shell, or leave it out: the fleet then stays up",
        )
    return Owner(pid, started)


def watch_owner(paths: FleetPaths, owner: Owner) -> None:
    """Stop the fleet when `owner` ends."""
    while is_running(owner.pid, owner.start_time):
        time.sleep(CHECK_INTERVAL_S)
    stop_fleet(paths.directory)
