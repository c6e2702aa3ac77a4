"""`train --resume`: continue a run from the RunSpec and manifest that it started with."""

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.network import check_network
from csdctl.notify import Say
from csdctl.placement.equation1 import Placed, steps_per_epoch
from csdctl.reporting.summary import RunSummary
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.worker.protocol.events import EARLY_STOPPING, Event, Finished, Joined
from csdctl.worker.protocol.json_codec import ProtocolError, from_json
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.data.deploy import cut_shards
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.options import TrainOptions
from csdctl.workflows.train.ranks import RunInputs
from csdctl.workflows.train.spec import fingerprint_data
from csdctl.workflows.train.train import RunObserver, run_to_end
from csdctl.workflows.workspace.workspace import Workspace

LATEST = "latest"
NEW_RUN = "start a new run"


def find_resumable(project: ProjectDirectory, run_id: str, job: Job, fleet: Fleet, say: Say) -> RunDirectory:
    """Return the run to resume (`run_id`, or LATEST), and report nodes that do not take part.

    Raises InputError for an unknown run, or the run of another job.
    """
    run = project.find_run(None if run_id == LATEST else run_id)
    plan: Any = run.load_manifest()["plan"]
    if plan["job"] != job.name:
        raise InputError(f"run {run.run_id} belongs to job {plan['job']}, not to {job.name}")
    present = set(fleet.machines)
    planned = {rank["node"] for rank in plan["ranks"]}
    if absent := sorted(planned - present):
        say(f"resuming without {', '.join(absent)}: private data there is not trained on")
    if new := sorted(present - planned):
        say(f"{', '.join(new)} did not take part when the run began, and will not take part now")
    return run


def is_complete(run: RunDirectory, job: Job) -> bool:
    """Return whether nothing is left to do: all epochs are done, or early stopping ended the run."""
    if not run.events.exists():
        return False
    last: Event | None = None
    manifest: Any = run.load_manifest()
    for event in run.read_events([rank["node"] for rank in manifest["plan"]["ranks"]]):
        if event.rank == 0 and isinstance(event, Joined | Finished):
            last = event
    if not isinstance(last, Finished):
        return False
    return last.reason == EARLY_STOPPING or (not last.reason and last.epochs >= job.recipe.epochs)


def resume(
    run: RunDirectory,
    job: Job,
    prepared: Prepared,
    space: Workspace,
    options: TrainOptions,
    observer: RunObserver,
) -> RunSummary:
    """Continue `run` from its last completed step, or its newest checkpoint; raises what `train` raises.

    Ranks on nodes outside the fleet stay absent; the others take over their public samples.
    """
    check_network(space.fleet.network)
    try:
        spec = from_json(RunSpec, run.spec.read_text())
    except (OSError, ProtocolError) as error:
        raise InputError(f"run {run.run_id} cannot be resumed: {error}", remedy=NEW_RUN) from None
    manifest: Any = run.load_manifest()
    _check_data(run, manifest["data"], prepared)
    _check_job(run, spec, job)
    placed = [Placed(**shard) for shard in manifest["placed"]]
    shards = cut_shards(placed, prepared.public, job, space.project)
    spec = dataclasses.replace(
        spec,
        recipe=job.recipe,
        architecture=prepared.model.architecture.path,
        weights=prepared.model.weights.path,
        step_file=str(space.project.step_file(run)),
        is_balanced=options.is_balanced,
        max_steps=options.max_steps,
    )
    inputs = RunInputs(run, spec, prepared, shards)
    return run_to_end(inputs, steps_per_epoch(placed), space, options, observer)


def _check_data(run: RunDirectory, before: Mapping[str, Any], prepared: Prepared) -> None:
    """Raise InputError when the data has changed; absent nodes are not compared."""
    private = {name: before["private"].get(name) for name in prepared.private}
    if fingerprint_data(prepared) != {"public": before["public"], "private": private}:
        raise InputError(f"the data of run {run.run_id} has changed since it began", remedy=NEW_RUN)


def _check_job(run: RunDirectory, spec: RunSpec, job: Job) -> None:
    """Raise InputError when recipe or noise has changed; more epochs are allowed."""
    if spec.recipe != dataclasses.replace(job.recipe, epochs=spec.recipe.epochs):
        raise InputError(
            f"the recipe of {job.path} has changed since run {run.run_id} began",
            remedy=f"undo the change (epochs may be raised), or {NEW_RUN}",
        )
    if spec.noise != job.noise:
        raise InputError(
            f"data.private.noise of {job.path} is {_describe(job.noise)}, "
            f"that of run {run.run_id} {_describe(spec.noise)}",
            remedy=f"undo the change, or {NEW_RUN}",
        )


def _describe(noise: Noise | None) -> str:
    return str(asdict(noise)) if noise else "absent"
