"""`train --resume`: continue a run from the RunSpec and manifest that it started with."""

import dataclasses
from dataclasses import asdict

from csdctl.documents import check_values, load_json
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.mpirun import check_network
from csdctl.notify import Say
from csdctl.placement.equation1 import steps_per_epoch
from csdctl.reporting.results import RunSummary
from csdctl.runs.directory import NEW_RUN, DataFingerprints, Manifest, ProjectDirectory, RunDirectory
from csdctl.worker.protocol.events import EARLY_STOPPING, Event, Finished, Joined
from csdctl.worker.protocol.features import KERAS, LITERT, FeatureOptions
from csdctl.worker.protocol.json_codec import SCHEMA
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import TRAIN_SPLIT, RunSpec, TaskSpec
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.options import TrainOptions
from csdctl.workflows.train.run import RunObserver, record_process, run_to_end
from csdctl.workflows.train.spec import RunContext, build_training, fingerprint_data
from csdctl.workflows.train.strategies.features import Features
from csdctl.workflows.train.strategies.strategy import Split, Strategy

MAX_CHECKPOINTS, MAX_INTERVAL_S = 1_000_000, 1e9


def find_resumable(project: ProjectDirectory, run_id: str, job: Job, fleet: Fleet, say: Say) -> RunDirectory:
    """Return the run to resume `run_id`, and report nodes that do not take part.

    Raises InputError for an unknown run, or the run of another job.
    """
    run = project.find_run(run_id)
    plan = _load_manifest(run).plan
    if plan.job != job.name:
        raise InputError(f"run {run.run_id} belongs to job {plan.job}, not to {job.name}")
    present = set(fleet.machines)
    planned = {rank.node for rank in plan.ranks}
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
    manifest = run.load_manifest()
    for event in run.read_events([rank["node"] for rank in manifest["plan"]["ranks"]]):
        if event.rank == 0 and isinstance(event, Joined | Finished):
            last = event
    if not isinstance(last, Finished):
        return False
    return last.reason == EARLY_STOPPING or (not last.reason and last.epochs >= job.recipe.epochs)


def resume(
    run: RunDirectory, context: RunContext, options: TrainOptions, observer: RunObserver
) -> RunSummary:
    """Continue `run` from its last completed step, or its newest checkpoint; raises what `train` raises.

    Ranks on nodes outside the fleet stay absent; the others take over their public samples.
    """
    job, prepared, space = context.job, context.prepared, context.space
    check_network(space.fleet.network)
    spec, manifest = load_spec(run), _load_manifest(run)
    _check_data(run, manifest.data, prepared)
    _check_job(run, spec, job, prepared)
    if spec.code != prepared.model.user_code:
        observer.say(f"the job's own code has changed since run {run.run_id} began; the changed code is used")
    placed = manifest.placed
    if placed[-1].public_stop != prepared.public.num_samples:
        raise InputError(
            f"{run.manifest}: `placed` divides {placed[-1].public_stop} public samples, "
            f"there are {prepared.public.num_samples}",
            remedy=NEW_RUN,
        )
    record_process(run, space)
    # No rank and no path of spec.json is used: they follow from the project and the data as they are now.
    kept = dataclasses.replace(
        options,
        checkpoint_interval_s=spec.checkpoint_interval_s,
        num_checkpoints=spec.num_checkpoints,
    )
    inputs = build_training(run, manifest.plan.ranks, placed, context, kept)
    inputs = strategy_of(spec).build_inputs(inputs, context)
    return run_to_end(inputs, steps_per_epoch(placed), space, options, observer)


def strategy_of(spec: RunSpec) -> Strategy:
    """Return the strategy with which a run began."""
    if spec.split:
        return Split(spec.split.cut, spec.split.num_micro_batches)
    if spec.head:
        prefix = spec.head.prefix
        return Features(FeatureOptions(prefix.precision, LITERT if prefix.lite else KERAS))
    return Strategy()


def load_spec(run: RunDirectory) -> RunSpec:
    """Read spec.json; raises InputError for values that no run started with."""
    content = load_json(run.spec, remedy=NEW_RUN)
    spec = check_values(content, RunSpec, str(run.spec), remedy=NEW_RUN)
    interval_s = spec.checkpoint_interval_s
    for name, found, expected in (
        ("schema", spec.schema, SCHEMA),
        ("run_id", spec.run_id, run.run_id),
        ("task", spec.task, TaskSpec(TRAIN_SPLIT) if spec.split else TaskSpec()),
        ("num_checkpoints", spec.num_checkpoints, min(max(spec.num_checkpoints, 1), MAX_CHECKPOINTS)),
        ("checkpoint_interval_s", interval_s, min(max(interval_s, 1.0), MAX_INTERVAL_S)),
    ):
        if found != expected:
            raise InputError(f"{run.spec}: `{name}` is {found!r}, expected {expected!r}", remedy=NEW_RUN)
    return spec


def _load_manifest(run: RunDirectory) -> Manifest:
    return Manifest.model_validate(run.load_manifest())


def _check_data(run: RunDirectory, before: DataFingerprints, prepared: Prepared) -> None:
    """Raise InputError when the data has changed; absent nodes are not compared."""
    private = {name: before.private.get(name) for name in prepared.private}
    if fingerprint_data(prepared) != {"public": before.public, "private": private}:
        raise InputError(f"the data of run {run.run_id} has changed since it began", remedy=NEW_RUN)


def _check_job(run: RunDirectory, spec: RunSpec, job: Job, prepared: Prepared) -> None:
    """Raise InputError when recipe or noise has changed; more epochs are allowed."""
    if spec.recipe != dataclasses.replace(prepared.recipe, epochs=spec.recipe.epochs):
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
