"""A run that is resumed: which one, whether it is complete, and whether it continues as it began.

When the server on which csdctl ran is lost, another server takes over its runs. Each server's rank has saved
the state after every step, and beside it manifest and spec of the run (worker/tasks/checkpointer.py). They
become a run of the project on that server, in which its machine is the host. Ranks keep their numbers, which
are part of the state. The two machines exchange theirs.
"""

import dataclasses
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from csdctl.documents import MAX_JSON_BYTES, load_text, parse_json_document
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.runs import directory
from csdctl.runs.directory import NEW_RUN, Manifest, ProjectDirectory, RunDirectory
from csdctl.tuning.plan import check_schema
from csdctl.worker.protocol.durable_files import make_directory, save_text
from csdctl.worker.protocol.events import EARLY_STOPPING, CheckpointSaved, Finished, Joined, Warned
from csdctl.worker.protocol.json_codec import SCHEMA, ProtocolError, from_json, to_json
from csdctl.worker.protocol.run_spec import COPIES, DatasetSlice, RunSpec
from csdctl.workflows.data.files import whole
from csdctl.workflows.train.resolved import RunContext, fingerprint_data

FORMER_HOST = "former-host"
"""The machine of a rank that was on a host beside the servers."""


def find_started(project: ProjectDirectory, run_id: str, say: Say) -> RunDirectory:
    """Return a run as `find_run`, but the latest one that has started its ranks: it can be resumed."""
    return directory.find_run(project, run_id, say, lambda run: (run.read_manifest(), load_spec(run)))


def find_resumable(project: ProjectDirectory, run_id: str, job: Job, fleet: Fleet, say: Say) -> RunDirectory:
    """Return the run to resume, and report nodes that do not take part. Raises InputError."""
    run = find_started(project, run_id, say)
    plan = run.read_manifest().plan
    if plan.job != job.name:
        raise InputError(
            f"run {run.run_id} belongs to job {plan.job}, not to {job.name}",
            remedy=f"resume it with the job file of {plan.job}, or name a run of {job.name}",
        )
    present = set(fleet.machines)
    planned = set(plan.nodes)
    if absent := sorted(planned - present):
        say(f"resuming without {', '.join(absent)}: private data there is not trained on")
    if new := sorted(present - planned):
        say(f"{', '.join(new)} did not take part when the run began, and will not take part now")
    return run


def is_complete(run: RunDirectory, job: Job) -> bool:
    """Return whether nothing is left to do: early stopping ended the run, or all epochs are done.

    A run that has lost its model saves it again from its state.
    Raises InputError for a run that has saved its state, and has none left: it would begin again.
    """
    last: Joined | Finished | None = None
    nodes, has_saved = run.read_manifest().nodes, False
    for _, event in run.read_events(nodes).skim():
        has_saved |= isinstance(event, CheckpointSaved)
        if event.rank == 0 and isinstance(event, Joined | Finished):
            last = event
    if isinstance(last, Finished):
        is_over = last.reason == EARLY_STOPPING or (last.epochs >= job.recipe.epochs and not last.reason)
        is_over &= not run.load_process().get("state")
        if is_over and directory.has_model(run.model, last.weights_hash):
            return True
    if has_saved and not run.has_state():
        problem = f"no state of run {run.run_id} is left: the checkpoints in {run.path} are gone"
        raise InputError(problem, remedy=f"restore them from a copy, or {NEW_RUN}")
    return False


def check_data(run: RunDirectory, spec: RunSpec, manifest: Manifest, context: RunContext) -> None:
    """Raise InputError if the run's data, recipe or noise has changed. More epochs are allowed."""
    job, prepared, now = context.job, context.prepared, fingerprint_data(context.prepared)
    private = {name: digest for name, digest in now["private"].items() if name in manifest.nodes}
    then = manifest.data.private
    changed = [f"private data of {name}" for name, digest in private.items() if digest != then.get(name)]
    # On another server, or copied, the same samples have another path or time.
    if now["public"] != manifest.data.public and not _is_content(spec.public, whole(prepared.public)):
        changed.append("public data")
    num_placed, num_public = manifest.placed[-1].public_stop, prepared.public.num_samples
    problem, remedy = "", f"undo the change (epochs may be raised), or {NEW_RUN}"
    if changed:
        problem = f"changed since run {run.run_id} began: {', '.join(changed)}"
        remedy = f"restore the data, or {NEW_RUN}"
    elif job.recipe.epochs < spec.recipe.epochs:
        problem = f"{job.path} has {job.recipe.epochs} epochs, run {run.run_id} has {spec.recipe.epochs}"
    elif spec.recipe != (recipe := dataclasses.replace(prepared.recipe, epochs=spec.recipe.epochs)):
        old, new = dataclasses.asdict(spec.recipe), dataclasses.asdict(recipe)
        keys = [f"{name} is {new[name]}, was {old[name]}" for name in old if new[name] != old[name]]
        problem = f"{job.path} and the recipe of run {run.run_id} differ: {'; '.join(keys)}"
        remedy += f", or restore {run.spec} if that was changed"
    elif spec.noise != job.noise:
        job_noise, run_noise = (str(asdict(it)) if it else "absent" for it in (job.noise, spec.noise))
        problem = f"data.private.noise of {job.path} is {job_noise}, that of run {run.run_id} {run_noise}"
        remedy = f"undo the change, or {NEW_RUN}"
    elif num_placed != num_public:
        problem = f"{run.manifest}: `placed` divides {num_placed} public samples, there are {num_public}"
        remedy = NEW_RUN
    if problem:
        raise InputError(problem, remedy=remedy)


def check_same(run: RunDirectory, before: RunSpec, now: RunSpec) -> None:
    """Raise InputError if validation data or frozen layers are not the same as when the run began."""
    for what, is_same in (
        ("validation data", _hashes_of(now, before) == _hashes_of(before, before)),
        ("frozen layers", _frozen_part(now) == _frozen_part(before)),
    ):
        if not is_same:
            problem = f"the {what} of run {run.run_id} changed after it began"
            raise InputError(problem, remedy=f"undo the change, or {NEW_RUN}")


def save_epochs(run: RunDirectory, spec: RunSpec, epochs: int) -> None:
    """Save the number of epochs of a resumed run in its spec and manifest, which views and reports read."""
    if epochs != spec.recipe.epochs:
        recipe = dataclasses.replace(spec.recipe, epochs=epochs)
        save_text(run.spec, to_json(dataclasses.replace(spec, recipe=recipe)))
        content = run.load_manifest()
        run.save_manifest(content | {"recipe": {**content.get("recipe", {}), "epochs": epochs}})


def _is_content(before: DatasetSlice | None, now: DatasetSlice) -> bool:
    """Return whether prepared data has the same bytes as before."""
    hashes = (now.images_sha256, now.labels_sha256)
    return before is not None and all(hashes) and hashes == (before.images_sha256, before.labels_sha256)


def _hashes_of(spec: RunSpec, began: RunSpec) -> tuple[str, str] | None:
    """Return the hashes of the validation data. Where a run began with features, only of the labels."""
    data = spec.validation
    return ("" if began.head else data.images_sha256, data.labels_sha256) if data else None


def _frozen_part(spec: RunSpec) -> tuple[str, ...]:
    """Return the names of the frozen part's files in the store, which are hashes of their content."""
    prefix = spec.head and spec.head.prefix
    return (Path(prefix.architecture).name, Path(prefix.weights).name) if prefix else ()


def load_spec(run: RunDirectory) -> RunSpec:
    """Read spec.json. Raises InputError for one that is damaged, of another version, or of another run."""
    text = load_text(run.spec, max_bytes=MAX_JSON_BYTES, remedy=NEW_RUN)
    check_schema(parse_json_document(text, str(run.spec), remedy=NEW_RUN), run.spec, SCHEMA)
    try:
        spec = from_json(RunSpec, text)
    except ProtocolError as error:
        raise InputError(f"{run.spec}: {error}", remedy=NEW_RUN) from None
    if spec.run_id != run.run_id:
        remedy = "if the run's directory was renamed, rename it back"
        raise InputError(f"{run.spec} is of run {spec.run_id}", remedy=remedy)
    return spec


def take_over(project: ProjectDirectory, run_id: str, server: str, state: Path, say: Say) -> None:
    """Make the run that `run_id` means one of csdctl on `server`, this machine. '' if it is no server.

    `state` is its state directory. Raises InputError for an unknown run, or one whose state is nowhere here.
    """
    if not server:
        return
    _move_copy(project, run_id, state)
    run = directory.find_run(project, run_id, say)
    manifest = run.load_manifest()
    if manifest["server"] != server and any(rank["node"] == server for rank in manifest["plan"]["ranks"]):
        run.save_manifest(with_host(manifest, server))
        say(f"run {run.run_id} is taken over from {manifest['server'] or FORMER_HOST}: {server} is the host")


def _move_copy(project: ProjectDirectory, run_id: str, state: Path) -> None:
    """Move this server's copy of the run into `project`: it is later than what the project has of it."""
    copies = ProjectDirectory(state / COPIES)
    run_ids = copies.run_ids()
    if not run_ids or (run_id == directory.LATEST and run_ids[-1] < max(project.run_ids(), default="")):
        return
    try:
        copy = copies.find_run(run_id)
    except InputError:
        return  # the project may know it
    run, state = RunDirectory(project.runs / copy.run_id), copies.step_file(copy)
    if not state.exists() and run.manifest.exists():
        return
    make_directory(run.logs)
    log = directory.EventLog(run)
    log.append(time.time(), Warned(0, HOST_NAME, "taken over: the other server has the events before"))
    log.close()
    directory.keep_step_file(state, run.kept_step_file)
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
