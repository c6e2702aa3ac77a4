"""`train`: choose plan or run, examine the machines, prepare, then train a new run or resume one.

A run succeeds when every rank that takes part has sent a completion record. A run is
resumed from the RunSpec and manifest that it started with.
"""

import dataclasses
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from csdctl.documents import MAX_JSON_BYTES, load_text, save_text
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, keep_nodes
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.launch.mpirun import find_mpirun
from csdctl.notify import Say
from csdctl.placement.equation1 import steps_per_epoch
from csdctl.reporting.privacy import check_accountant
from csdctl.reporting.results import RunSummary, read_results
from csdctl.runs.directory import NEW_RUN, Manifest, ProjectDirectory, RunDirectory, find_run
from csdctl.transport.commands import find_state_directory
from csdctl.tuning.plan import FEATURES, SPLIT, Plan, load_plan
from csdctl.worker.protocol.events import EARLY_STOPPING, CheckpointSaved, Finished, Joined
from csdctl.worker.protocol.features import FLOAT32
from csdctl.worker.protocol.json_codec import ProtocolError, from_json, to_json
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import DatasetSlice, RunSpec, SplitSpec
from csdctl.workflows.data.files import whole
from csdctl.workflows.data.prepare import Prepared, load_prepared, prepare_in
from csdctl.workflows.preflight.doctor import examine
from csdctl.workflows.train.late import check_late
from csdctl.workflows.train.plan import check_plan, find_left_out, resolve_plan
from csdctl.workflows.train.run import record_process, run_to_end
from csdctl.workflows.train.spec import (
    AUTO,
    RunContext,
    TrainOptions,
    build_manifest,
    build_training,
    describe_strategy,
    fingerprint_data,
    place_plan,
)
from csdctl.workflows.train.strategies import Features, Split, Strategy
from csdctl.workflows.train.takeover import take_over
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import Workspace, open_workspace


def find_started(project: ProjectDirectory, run_id: str, say: Say) -> RunDirectory:
    """Return a run as `find_run`, but the latest one that has started its ranks: it can be resumed."""
    return find_run(project, run_id, say, lambda run: (run.load_manifest(), load_spec(run)))


def find_resumable(project: ProjectDirectory, run_id: str, job: Job, fleet: Fleet, say: Say) -> RunDirectory:
    """Return the run to resume `run_id`, and report nodes that do not take part.

    Raises InputError for an unknown run, or the run of another job.
    """
    run = find_started(project, run_id, say)
    plan = _load_manifest(run).plan
    if plan.job != job.name:
        raise InputError(
            f"run {run.run_id} belongs to job {plan.job}, not to {job.name}",
            remedy=f"resume it with the job file of {plan.job}, or name a run of {job.name}",
        )
    present = set(fleet.machines)
    planned = {rank.node for rank in plan.ranks}
    if absent := sorted(planned - present):
        say(f"resuming without {', '.join(absent)}: private data there is not trained on")
    if new := sorted(present - planned):
        say(f"{', '.join(new)} did not take part when the run began, and will not take part now")
    return run


def is_complete(run: RunDirectory, job: Job) -> bool:
    """Return whether nothing is left to do: early stopping ended the run, or all epochs are done.

    A run that has lost its model after all epochs saves it again from its state.
    Raises InputError for a run that has saved its state, and has none left: it would begin again.
    """
    last: Joined | Finished | None = None
    has_saved = False
    nodes = [rank.node for rank in _load_manifest(run).plan.ranks]
    for event in run.read_events(nodes) if os.path.lexists(run.events) else ():
        has_saved |= isinstance(event, CheckpointSaved)
        if event.rank == 0 and isinstance(event, Joined | Finished):
            last = event
    is_at_end = isinstance(last, Finished) and last.epochs >= job.recipe.epochs and not last.reason
    has_model = run.model.is_file() or run.model.with_suffix(".weights.h5").is_file()
    if (is_at_end and has_model) or (isinstance(last, Finished) and last.reason == EARLY_STOPPING):
        return True
    step_file = ProjectDirectory(run.path.parents[2]).step_file(run)
    states = run.kept_step_file, step_file, *run.path.glob("checkpoints/*.npz")
    if has_saved and not any(map(os.path.lexists, states)):
        problem = f"no state of run {run.run_id} is left: the checkpoints in {run.path} are gone"
        raise InputError(problem, remedy=f"restore them from a copy, or {NEW_RUN}")
    return False


def resume(run: RunDirectory, context: RunContext, options: TrainOptions, events: EventStream) -> RunSummary:
    """Continue `run` from its last completed step, or its newest checkpoint. Raises what `train` raises.

    Ranks on nodes outside the fleet stay absent. The others take over their public samples.
    """
    job, prepared, space = context.job, context.prepared, context.space
    spec, manifest = load_spec(run), _load_manifest(run)
    before = manifest.data
    planned = {rank.node for rank in manifest.plan.ranks}
    now = fingerprint_data(prepared)
    private = {name: hashed for name, hashed in now["private"].items() if name in planned}
    is_private_same = private == {name: before.private.get(name) for name in private}
    # On another server, or copied, the same samples have another path or time.
    is_public_same = now["public"] == before.public or _is_content(spec.public, whole(prepared.public))
    if not is_public_same or not is_private_same:
        raise InputError(f"the data of run {run.run_id} has changed since it began", remedy=NEW_RUN)
    _check_job(run, spec, job, prepared)
    if spec.code != prepared.model.user_code:
        events.say(f"the job's own code has changed since run {run.run_id} began; the changed code is used")
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
        checkpoint_interval_s=options.checkpoint_interval_s or spec.checkpoint_interval_s,
        num_checkpoints=options.num_checkpoints or spec.num_checkpoints,
    )
    inputs = build_training(run, manifest.plan.ranks, placed, context, kept)
    if _hashes_of(inputs.spec, spec) != _hashes_of(spec, spec):
        raise _changed("validation data", run)
    inputs = strategy_of(spec).build_inputs(inputs, context)
    if _frozen_part(inputs.spec) != _frozen_part(spec):
        raise _changed("frozen layers", run)
    if job.recipe.epochs != spec.recipe.epochs:  # views and reports read it
        recipe = dataclasses.replace(spec.recipe, epochs=job.recipe.epochs)
        save_text(run.spec, to_json(dataclasses.replace(spec, recipe=recipe)))
        content = run.load_manifest()
        run.save_manifest(content | {"recipe": {**content.get("recipe", {}), "epochs": job.recipe.epochs}})
    return run_to_end(inputs, steps_per_epoch(placed), space, options, events)


def _changed(what: str, run: RunDirectory) -> InputError:
    remedy = f"undo the change, or {NEW_RUN}"
    return InputError(f"the {what} of run {run.run_id} changed after it began", remedy=remedy)


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


def strategy_of(spec: RunSpec) -> Strategy:
    """Return the strategy with which a run began."""
    if spec.split:
        return Split(spec.split.cut, spec.split.num_micro_batches)
    if spec.head:
        return Features(spec.head.prefix.precision)
    return Strategy()


def load_spec(run: RunDirectory) -> RunSpec:
    """Read spec.json. Raises InputError for one that is damaged, or of another version."""
    try:
        return from_json(RunSpec, load_text(run.spec, max_bytes=MAX_JSON_BYTES, remedy=NEW_RUN))
    except ProtocolError as error:
        raise InputError(f"{run.spec}: {error}", remedy=NEW_RUN) from None


def _load_manifest(run: RunDirectory) -> Manifest:
    return Manifest.model_validate(run.load_manifest())


def _check_job(run: RunDirectory, spec: RunSpec, job: Job, prepared: Prepared) -> None:
    """Raise InputError when recipe or noise has changed. More epochs are allowed."""
    if job.recipe.epochs < spec.recipe.epochs:
        raise InputError(
            f"{job.path} has {job.recipe.epochs} epochs, run {run.run_id} has {spec.recipe.epochs}",
            remedy=f"undo the change (epochs may be raised), or {NEW_RUN}",
        )
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


@dataclass(frozen=True)
class TrainRequest:
    """The request of one `csdctl train`."""

    job: Job
    fleet: Fleet
    directory: Path
    options: TrainOptions
    plan_path: Path | None = None
    """None: the plan that `tune` wrote for the job."""
    batch_size: int | None = None
    """Use this batch size on every rank instead of a plan."""
    resume: str | None = None
    """The id of the run to resume, or 'latest'."""
    is_preflight_skipped: bool = False

    def __post_init__(self) -> None:
        """Raise InputError for two sources of the batch sizes, or of the strategy, of one run."""
        plan, size, strategy = self.plan_path, self.batch_size, self.options.strategy != AUTO
        precision = self.options.feature_precision != FLOAT32
        micro_batches = self.options.num_micro_batches != SplitSpec.num_micro_batches
        why = "a run continues as it began" if self.resume else "a plan has the batch size of each rank"
        for first, other, is_given in (
            ("resume", "plan", self.resume and plan),
            ("resume", "batch-size", self.resume and size),
            ("resume", "strategy", self.resume and strategy),
            ("resume", "feature-precision", self.resume and precision),
            ("resume", "micro-batches", self.resume and micro_batches),
            ("plan", "batch-size", plan and size),
        ):
            if is_given:
                problem = f"--{first} and --{other} contradict each other: {why}"
                raise InputError(problem, remedy="use only one of them")

    def check_files(self, say: Say = lambda line: None) -> Fleet:
        """Check run and plan as far as that needs no machine: before any is contacted.

        Returns the fleet without the nodes that take no part, after telling of them. Raises InputError for a
        run or plan that does not exist, or does not fit job and fleet.
        """
        project = ProjectDirectory(self.directory)
        if self.resume is not None:
            run = find_resumable(project, self.resume, self.job, self.fleet, say)
            plan = _load_manifest(run).plan
            return keep_nodes(self.fleet, {rank.node for rank in plan.ranks})
        if not self.batch_size:
            plan = load_plan(self.plan_path or project.plan(self.job.name))
            check_plan(plan, self.job, self.fleet, {})
        else:
            return self.fleet
        if left_out := find_left_out(plan, self.fleet):
            say(f"the plan leaves out {format_node_names(left_out)}: training is faster without them")
        return keep_nodes(self.fleet, {*self.fleet.machines} - {*left_out})


@dataclass(frozen=True)
class TrainResult:
    """The run and its results."""

    directory: RunDirectory
    summary: RunSummary
    was_complete: bool = False
    """Nothing was left to resume."""


def run_training(request: TrainRequest, events: EventStream) -> TrainResult:
    """Train a new run, or resume one. Raises CsdctlError, and RunStopped when the user stops it."""
    find_mpirun()
    if request.resume is not None:
        here, state = request.fleet.here, find_state_directory(request.fleet.here_state)
        take_over(ProjectDirectory(request.directory), request.resume, here, state, events.say)
    fleet = request.check_files(events.say)
    if request.job.noise:
        check_accountant()
    min_nodes = request.options.min_nodes
    with open_workspace(
        request.directory, fleet, "train", is_locking=True, say=events.say, min_nodes=min_nodes
    ) as space:
        if request.resume:
            run = find_started(space.project, request.resume, lambda line: None)
            if is_complete(run, request.job):
                return TrainResult(run, read_results(run).summary, was_complete=True)
            strategy = strategy_of(load_spec(run))
        else:
            plan = resolve_plan(request.job, space, events.say, request.plan_path, request.batch_size)
            strategy = choose_strategy(request.options, plan)
        check_late(request.job, strategy, space, events.say)
        # Before data is prepared for hours; otherwise the run itself links the machines at once.
        _examine(request, space, events, with_links=load_prepared(space.project, request.job) is None)
        prepared = prepare_in(space, request.job, events)
        context = RunContext(request.job, prepared, space, events)
        if request.resume:
            return TrainResult(run, resume(run, context, request.options, events))
        summary = train(plan, context, request.options, events)
        return TrainResult(space.project.find_run(summary.run_id), summary)


def choose_strategy(options: TrainOptions, plan: Plan) -> Strategy:
    """Return the strategy that the user asks for. Without one, that of `plan`."""
    name = plan.strategy if options.strategy == AUTO else options.strategy
    options.check_strategy_options(name)
    if name == SPLIT:
        cut = options.cut or (plan.cut if plan.strategy == SPLIT else "")
        return Split(cut, options.num_micro_batches)
    return Features(options.feature_precision) if name == FEATURES else Strategy()


@dataclass(frozen=True)
class Rehearsal:
    """The plan and strategy that `csdctl train` would use."""

    plan: Plan
    strategy: str
    cut: str
    run: RunDirectory | None = None
    """The run that would be resumed."""
    num_samples: int | None = None
    """Samples of an epoch, as the job was last prepared; None: it would be prepared first."""


def rehearse_training(request: TrainRequest, events: EventStream) -> Rehearsal:
    """Choose plan or run and examine the machines as `run_training` does, without preparing or training."""
    find_mpirun()
    fleet = request.check_files(events.say)
    min_nodes = request.options.min_nodes
    with open_workspace(request.directory, fleet, "train", say=events.say, min_nodes=min_nodes) as space:
        run = None
        if request.resume:
            run = find_started(space.project, request.resume, lambda line: None)
            plan, strategy = Manifest.model_validate(run.load_manifest()).plan, strategy_of(load_spec(run))
        else:
            plan = resolve_plan(request.job, space, events.say, request.plan_path, request.batch_size)
            strategy = choose_strategy(request.options, plan)
        check_late(request.job, strategy, space, events.say)
        _examine(request, space, events)
        recorded = load_prepared(space.project, request.job)
    recipe = request.job.recipe
    rules = recipe.early_stopping, recipe.reduce_on_plateau
    for name in (rule.monitor.removeprefix("validation_") for rule in rules if rule):
        if name not in ("loss", *recipe.metrics):
            events.say(f"warning: {name!r} is monitored: `train` fails unless the model has this metric")
    return Rehearsal(plan, strategy.name, strategy.cut, run, recorded.num_samples if recorded else None)


def _examine(
    request: TrainRequest, space: Workspace, events: EventStream, *, with_links: bool = True
) -> None:
    if not request.is_preflight_skipped:
        root, sessions = space.project.root, space.sessions
        examination = examine(space.fleet, root, sessions=sessions, with_links=with_links)
        events.emit(examination)
        examination.check_before_training()


def train(plan: Plan, context: RunContext, options: TrainOptions, events: EventStream) -> RunSummary:
    """Train a new run to its end.

    Raises RunError, DeadlineError or InputError when it fails, RunStopped when the user stops it. The caller
    has locked the machines and called `plan.check_plan`.
    """
    job, prepared, space = context.job, context.prepared, context.space
    strategy = choose_strategy(options, plan)
    plan = strategy.choose_ranks(plan, context)
    placed = place_plan(plan, prepared, job, space.whole)
    for shard in placed:
        if (size := shard.batch_size) > shard.num_samples:
            larger = f"its batch size {size:,}, to which the learning rate is scaled, is larger"
            events.say(f"{shard.name} has {shard.num_samples:,} samples: {larger}")
    if options.min_nodes is not None and 1 < len(placed) <= options.min_nodes:
        problem = f"--min-nodes {options.min_nodes}, but {len(placed) - 1} nodes take part"
        raise InputError(problem, remedy="pass a smaller number")
    run = space.project.new_run()
    record_process(run, space)
    manifest = build_manifest(job, plan, placed, prepared, space)
    run.save_manifest(manifest | describe_strategy(plan, strategy.name, strategy.cut))
    inputs = build_training(run, plan.ranks, placed, context, options)
    inputs = strategy.build_inputs(inputs, context)
    save_text(run.spec, to_json(inputs.spec))
    return run_to_end(inputs, steps_per_epoch(placed), space, options, events)
