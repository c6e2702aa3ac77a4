"""The takeover of a run by another server, when the one on which csdctl ran is lost.

The rank of each other server has saved the state after every step, and beside it manifest and spec of the run
(worker/tasks/checkpointer.py). They become a run of the project on that server, in which its machine is the
host. Ranks keep their numbers, which are part of the state. The two machines exchange theirs.
"""

import shutil
from pathlib import Path
from typing import Any

from csdctl.documents import MAX_JSON_BYTES, load_text, make_directory, save_text
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.notify import Say
from csdctl.runs.directory import LATEST, ProjectDirectory, RunDirectory, find_run, keep_step_file
from csdctl.worker.protocol.run_spec import COPIES

FORMER_HOST = "former-host"
"""The machine of a rank that was on a host beside the servers."""


def take_over(project: ProjectDirectory, run_id: str, server: str, state: Path, say: Say) -> None:
    """Make the run that `run_id` means one of csdctl on `server`, this machine. '' if it is no server.

    `state` is the state directory of this machine.

    Raises InputError for an unknown run, or one whose state is nowhere here.
    """
    if not server:
        return
    _move_copy(project, run_id, state)
    run = find_run(project, run_id, say)
    manifest = run.load_manifest()
    if manifest["server"] != server and any(rank["node"] == server for rank in manifest["plan"]["ranks"]):
        run.save_manifest(with_host(manifest, server))
        say(f"run {run.run_id} is taken over from {manifest['server'] or FORMER_HOST}: {server} is the host")


def _move_copy(project: ProjectDirectory, run_id: str, state: Path) -> None:
    """Move this server's copy of the run into `project`, if there is one.

    It is later than what `project` has of the run: csdctl on another server has trained it since.
    """
    copies = ProjectDirectory(state / COPIES)
    run_ids = copies.run_ids()
    if not run_ids or (run_id == LATEST and run_ids[-1] < max(project.run_ids(), default="")):
        return
    try:
        copy = copies.find_run(run_id)
    except InputError:
        return  # the project may know it
    run, state = RunDirectory(project.runs / copy.run_id), copies.step_file(copy)
    if not state.exists() and run.manifest.exists():
        return
    make_directory(run.logs)
    keep_step_file(state, run.kept_step_file)
    if state.exists() or not run.kept_step_file.exists():
        raise InputError(
            f"found no state of run {run.run_id} in {state} that could be moved to {run.kept_step_file}",
            remedy="free space on that disk; if this machine has restarted since, resume on another server",
        )
    for source, target in ((copy.spec, run.spec), (copy.manifest, run.manifest)):
        save_text(target, load_text(source, max_bytes=MAX_JSON_BYTES))
    shutil.rmtree(copy.path)


def with_host(manifest: dict[str, Any], server: str) -> dict[str, Any]:
    """Return the manifest as csdctl on `server` has it, which has a rank: that one and rank 0 change places.

    The former host is a server for it. Each rank keeps its batch size, which the state has too.
    """
    ranks, placed = manifest["plan"]["ranks"], manifest["placed"]
    number = next(number for number, rank in enumerate(ranks) if rank["node"] == server)
    former = manifest["server"] or FORMER_HOST
    host, successor = ranks[0], ranks[number]
    ranks[0], ranks[number] = _of_size(successor, host, HOST_NAME), _of_size(host, successor, former)
    placed[number]["name"] = former
    return {**manifest, "server": server}


def _of_size(machine: dict[str, Any], before: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of a machine for the batch size of another. A large one is in micro-batches."""
    size, limit = before["batch_size"], machine["max_batch_size"]
    changed = {"node": name, "batch_size": size}
    if limit and size > limit:
        changed |= {"max_batch_size": size, "micro_batch_size": machine["micro_batch_size"] or limit}
    return {**machine, **changed}
