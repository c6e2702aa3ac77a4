"""Find processes and files that an earlier csdctl left on a machine. End and remove them on request.

Sent as source, so it uses the standard library only. Runs in the session's directory. Reads a line of JSON
with the fields of `CleanupOptions` (launch/leftovers.py). Writes the frame `@csdctl-result JSON` with the
fields of `Leftovers` there. Where another csdctl holds the lock, nothing is changed unless that is forced:
`@csdctl-held JSON` has the `holder`.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

RANK_MARKER = "csdctl-run="
DAEMON_MARKER = "csdctl_run_"
LOCK = ".csdctl/lock"
PLACES = ("", "*/", "runs/*/", "runs/*/checkpoints/", "data/*/")
PARTS = (
    *(".csdctl/objects/*.part", ".csdctl/trees/.part-*", ".csdctl/tmp????????.*", ".csdctl/runs/*/part-*"),
    *(f".csdctl/{place}.*.{end}" for place in PLACES for end in ("[a-z0-9_]" * 8, "new")),
)
"""Patterns of files that a killed command, also of an earlier version, has not finished."""
FEATURES, PREDICTIONS = ".csdctl/features", ".csdctl/predictions"
COPIES = ".csdctl/copies"
"""Copies of another server's runs, laid out as a project directory. Their states are in /dev/shm."""
SANDBOX_USERS = range(1_907_000_000, 1_907_000_000 + 3600 * 65_536)
"""User IDs of the sandboxes that root starts (worker/protocol/sandbox.py)."""
TREES, OBJECTS = ".csdctl/trees/*", ".csdctl/objects/*"
KEPT = (
    *(f".csdctl/{place}/*" for place in ("data", "features", "predictions", "models", "shards")),
    *(".csdctl/data/.part-*", ".csdctl/logs/*", ".csdctl/scratch/*", ".csdctl/detached-*.log"),
)
"""Patterns of what is made again when it is needed, and of logs."""
RECEIVE_LOCK = ".csdctl/receive.lock"


def main() -> None:
    """Serve one request, for one run or for everything in this directory."""
    os.umask(0o077)
    request = json.loads(sys.stdin.readline())
    run_id = request["run_id"]
    holder = None if run_id else find_holder()
    if holder is not None and not request["is_forced"]:
        print("@csdctl-held " + json.dumps({"holder": holder}), flush=True)
        return
    processes = find_processes(os.getcwd(), run_id, request["node"])
    if request["is_ending"]:
        holding = find_lock_processes(holder)
        end_all([*processes, *holding])
        end_s = time.monotonic() + 10.0  # the kernel may take a while to release the lock of an ended process
        while holding and find_holder() is not None and time.monotonic() < end_s:
            time.sleep(0.02)
        for pid in processes:
            remove(glob.glob(scratch_directories(pid)))
    is_pruning = not run_id and request["is_pruning"]
    if request["is_removing"] and (is_pruning or request["unused_s"] is not None) and is_own(".csdctl"):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        fcntl.flock(os.open(RECEIVE_LOCK, flags, 0o600), fcntl.LOCK_EX)  # no delivery goes on meanwhile
    paths = [f"{COPIES}/.csdctl/runs/{run_id}", step_files(COPIES, run_id)] if run_id else find_paths(request)
    paths = [path for path in paths if os.path.lexists(path) and is_own(path)]
    leftovers = {
        "num_processes": len(processes),
        "runs": [*dict.fromkeys(run for run in processes.values() if run)],
        "paths": paths,
        "num_bytes": sum(size_of(path) for path in paths),
    }
    if request["is_removing"]:
        remove(paths)
        remove(find_unused() if is_pruning else [])  # the objects of trees that were removed
        leftovers["paths"] = paths = [path for path in paths if not os.path.lexists(path)]
        place = os.getcwd()
        if request["is_removing_all"] and os.path.basename(os.path.dirname(place)) == "machines":
            remove_empty(place)
    for name, path in (("features_bytes", FEATURES), ("predictions_bytes", PREDICTIONS)):
        leftovers[name] = size_of(path) if not run_id and path not in paths and os.path.isdir(path) else 0
    print("@csdctl-result " + json.dumps(leftovers), flush=True)


def find_holder() -> "dict[str, Any] | None":
    """Return the description of the lock's holder. {} if it is unreadable, None if there is no holder."""
    try:
        # Opened for writing, because NFS locks no file that is open only for reading.
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    end_s = time.monotonic() + 3.0
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                holder = {}
                with contextlib.suppress(ValueError, TypeError):
                    holder = dict(json.loads(os.pread(lock, 4096, 0)))
                # A new holder writes after it has locked: see receive.py
                if os.path.exists("/proc/" + str(holder.get("holding_pid"))) or time.monotonic() > end_s:
                    return holder
            time.sleep(0.02)
    finally:
        os.close(lock)


def find_lock_processes(holder: "dict[str, Any] | None") -> "list[int]":
    """Return the process that `holder` names, if it has the lock's file open."""
    pid: Any = holder.get("holding_pid") if holder else None
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd") if isinstance(pid, int) else []:
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samefile(f"/proc/{pid}/fd/{name}", LOCK):
                    return [pid]
    return []


def find_processes(home: str, run_id: str, node: str) -> "dict[int, str]":
    """Return the processes of csdctl by pid, with their runs or ''.

    With `run_id`, the processes of that run, and with `node`, of that node in the run. Without `run_id`, all
    processes in `home`. Command lines identify them: ranks and MPI daemons have the run's id, and other
    processes of csdctl run a file of its store.
    """
    processes = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = [os.fsdecode(word) for word in file.read().split(b"\0")]
            run = run_of(words)
            if node and f"{RANK_MARKER}{run_id}/{node}" not in words:
                continue
            is_of_csdctl = run or any(word.startswith(".csdctl/objects/") for word in words)
            if run == run_id if run_id else is_of_csdctl and os.path.samefile(f"/proc/{pid}/cwd", home):
                processes[int(pid)] = run
        except OSError:  # it has ended, or belongs to another user
            continue
    return processes


def run_of(words: "list[str]") -> str:
    """Return the run id in a command line, or ''."""
    for word in words:
        if word.startswith(RANK_MARKER):
            return word[len(RANK_MARKER) :].partition("/")[0]
        if word.startswith(DAEMON_MARKER):
            return word[len(DAEMON_MARKER) :]
    return ""


def end_all(pids: "list[int]") -> None:
    """Kill processes and their descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
            parent = int(file.read().rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    for pid in pids:  # grows during the iteration
        pids += children.get(pid, [])
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def find_paths(request: "dict[str, Any]") -> "list[str]":
    """Return the paths to remove: unfinished files, and if requested computed files or all of csdctl's."""
    paths = [path for pattern in PARTS for path in glob.glob(pattern)]
    if request["is_removing_all"]:
        paths = [*find_linked_trees().values(), ".csdctl", *glob.glob(step_files())]
    else:
        paths += [FEATURES, PREDICTIONS] if request["is_removing_computed"] else []
        kept = find_unused()
        paths += kept if request["is_pruning"] else []
        if request["unused_s"] is not None:
            kept += [path for pattern in KEPT for path in glob.glob(pattern)]
            new = [path for path in kept if os.path.dirname(path) not in paths]
            paths += [path for path in new if is_older(path, request["unused_s"])]
        paths = [*dict.fromkeys(paths)]
    paths += [*glob.glob(step_files(COPIES)), COPIES]
    # A process that was killed leaves its directory behind.
    for path in glob.glob(scratch_directories("*")):
        pid = path.split("-")[-2]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            paths.append(path)
    return paths


def is_own(path: str) -> bool:
    """Return whether `path` belongs to this user or its sandboxes. In /tmp, everybody creates files."""
    try:
        owner, user = os.lstat(path).st_uid, os.geteuid()
        return owner == user or (user == 0 and owner in SANDBOX_USERS)
    except OSError:
        return False


def scratch_directories(pid: object) -> str:
    """Return the pattern of the scratch directories of process `pid` and of its sandboxes."""
    return os.path.join(glob.escape(tempfile.gettempdir()), f"csdctl-*-{pid}-*")


def step_files(directory: str = "", run_id: str = "*") -> str:
    """Return the pattern of the states of a directory's unfinished runs, for `train --resume`."""
    place = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:12]
    return f"/dev/shm/csdctl-{os.geteuid()}/{place}-{run_id}"


def find_linked_trees() -> "dict[str, str]":
    """Return deployed trees with the destinations that link to them. The user may have replaced the link."""
    destinations = {}
    for path in glob.glob(TREES + ".link"):
        tree = path[: -len(".link")]
        with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            destination = os.fsdecode(file.read())
            if os.path.realpath(os.readlink(destination)) == os.path.realpath(tree):
                destinations[tree] = destination
    return destinations


def find_unused() -> "list[str]":
    """Return trees without a link, and objects of no tree, such as the worker."""
    if not is_own(".csdctl"):  # another user could lead elsewhere
        return []
    used = find_linked_trees()
    trees = [path for path in glob.glob(TREES) if not path.endswith(".link") and path not in used]
    links = [f"{path}.link" for path in trees if os.path.lexists(f"{path}.link")]
    return [*trees, *links, *(path for path in glob.glob(OBJECTS) if os.lstat(path).st_nlink == 1)]


def is_older(path: str, seconds: float) -> bool:
    """Return whether nothing has read or written a file, or one below a directory, for so long."""
    files = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
    times = [0.0]
    for file in files or [path]:
        with contextlib.suppress(OSError):
            times += [os.lstat(file).st_atime, os.lstat(file).st_mtime]
    return max(times) < time.time() - seconds


def size_of(path: str) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    sizes = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
    total = 0
    for file in sizes or [path]:
        with contextlib.suppress(OSError):
            total += os.lstat(file).st_size
    return total


def remove_empty(state: str) -> None:
    """Remove the directory of this machine, and its parents if no other machine or project uses them."""
    machines = os.path.dirname(state)
    with contextlib.suppress(OSError):
        os.rmdir(state)
        os.rmdir(machines)
        if os.path.basename(os.path.dirname(machines)) == ".csdctl":
            os.rmdir(os.path.dirname(machines))


def remove(paths: "list[str]") -> None:
    """Remove files and directories that are this user's, ignoring errors."""
    for path in filter(is_own, paths):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


if __name__ == "__main__":
    main()
