"""`train`: choose plan or run, examine the machines, prepare, resolve the run, and train to its end.

A run succeeds when every rank that takes part has sent a completion record. A run is resumed from the RunSpec
and manifest that it started with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from csdctl.documents import save_text
from csdctl.errors import InputError, option
from csdctl.fleet.model import Fleet, keep_nodes
from csdctl.fleet.names import format_node_names
from csdctl.launch.mpirun import find_mpirun
from csdctl.notify import Say
from csdctl.placement.equation1 import Placed
from csdctl.reporting.privacy import check_accountant
from csdctl.reporting.results import RunSummary, read_results
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.transport.commands import find_state_directory
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import TaskSpec
from csdctl.workflows.data.prepare import load_prepared, prepare_in
from csdctl.workflows.preflight.examination import examine_before_training
from csdctl.workflows.train.late import check_late
from csdctl.workflows.train.plan import build_equal_plan, find_left_out, load_fitting_plan
from csdctl.workflows.train.request import TrainOptions, TrainRequest
from csdctl.workflows.train.resume import (
    check_data,
    check_same,
    find_resumable,
    find_started,
    is_complete,
    load_spec,
    save_epochs,
)
from csdctl.workflows.train.run import record_process, run_to_end, store_manifest
from csdctl.workflows.train.spec import (
    ResolvedRun,
    RunContext,
    build_manifest,
    build_spec,
    place_plan,
    read_plan,
)
from csdctl.workflows.train.strategies import Strategy, choose_strategy, strategy_of
from csdctl.workflows.train.takeover import take_over
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import Workspace, open_workspace

NUM_CHECKPOINTS = 3
"""Checkpoints to keep where the user says nothing."""


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
    fleet, plan = check_files(request, events.say)
    if request.job.noise:
        check_accountant()
    with open_workspace(
        request.directory,
        fleet,
        "train",
        is_locking=True,
        say=events.say,
        min_nodes=request.options.min_nodes,
    ) as space:
        choice = _choose(request, plan, space, events)
        if choice.run and is_complete(choice.run, request.job):
            return TrainResult(choice.run, read_results(choice.run).summary, was_complete=True)
        # Before data is prepared for hours; otherwise the run itself links the machines at once.
        _examine(request, space, events, with_links=load_prepared(space.project, request.job) is None)
        context = RunContext(request.job, prepare_in(space, request.job, events), space, events)
        if choice.run:
            return TrainResult(choice.run, resume(choice.run, choice.strategy, context, request.options))
        summary = train(choice.plan, choice.strategy, context, request.options)
        return TrainResult(space.project.find_run(summary.run_id), summary)


def check_files(request: TrainRequest, say: Say = lambda line: None) -> tuple[Fleet, Plan | None]:
    """Check run and plan before any machine is contacted.

    Returns the fleet without the nodes that take no part, which are reported, and the plan. There is none for
    one batch size on all machines. Raises InputError for a run or plan that does not exist, or does not fit
    job and fleet.
    """
    project, job, fleet = ProjectDirectory(request.directory), request.job, request.fleet
    if request.resume is not None:
        plan = find_resumable(project, request.resume, job, fleet, say).read_manifest().plan
        return keep_nodes(fleet, {rank.node for rank in plan.ranks}), plan
    if request.batch_size:
        return fleet, None
    plan = load_fitting_plan(request.plan_path or project.plan(job.name), job, fleet, say)
    if left_out := find_left_out(plan, fleet):
        say(f"the plan leaves out {format_node_names(left_out)}: training is faster without them")
    return keep_nodes(fleet, {*fleet.machines} - {*left_out}), plan


@dataclass(frozen=True)
class _Choice:
    """Which plan is trained by which strategy, or which run is resumed."""

    plan: Plan
    strategy: Strategy
    run: RunDirectory | None = None


def _choose(request: TrainRequest, plan: Plan | None, space: Workspace, events: EventStream) -> _Choice:
    """Return the choice of plan or run, after checking that late nodes can join it.

    `plan`: from `check_files`.
    """
    if plan is None:
        plan = build_equal_plan(request.job, space.whole, space.facts, request.batch_size or 0)
    if request.resume:
        run = find_started(space.project, request.resume, lambda line: None)
        choice = _Choice(plan, strategy_of(load_spec(run)), run)
    else:
        choice = _Choice(plan, choose_strategy(request.options, plan))
    check_late(request.job, choice.strategy, space, events.say)
    return choice


def _examine(
    request: TrainRequest, space: Workspace, events: EventStream, *, with_links: bool = True
) -> None:
    if not request.is_preflight_skipped:
        examination = examine_before_training(space, with_links=with_links)
        events.emit(examination)
        examination.check_before_training()


def resolve_run(
    ranks: Sequence[RankPlan],
    strategy: Strategy,
    context: RunContext,
    placed: Sequence[Placed] | None = None,
    *,
    is_verification: bool = False,
) -> ResolvedRun:
    """Return what the ranks of a plan read and compute with a strategy, or for its verification.

    `placed`: the shards, if they are decided already. Raises InputError when fleet, data or model does not
    allow it, and PartialError naming the machines that failed.
    """
    model = strategy.divide(context, is_verification=is_verification)  # refuses a job before shards are cut
    data = read_plan(ranks, context, placed)
    if is_verification:
        data = replace(data, validation=None)
    data, features = strategy.compute(data, model, context, is_verification=is_verification)
    return ResolvedRun(
        context,
        data,
        model,
        task=TaskSpec(strategy.verification_task if is_verification else strategy.training_task),
        recipe=context.prepared.recipe,
        is_balanced=strategy.is_balanced,
        features=features,
    )


def train(plan: Plan, strategy: Strategy, context: RunContext, options: TrainOptions) -> RunSummary:
    """Train a new run to its end.

    Raises RunError, DeadlineError or InputError when it fails, RunStopped when the user stops it. The caller
    has locked the machines and called `load_fitting_plan`.
    """
    project = context.space.project
    plan = strategy.choose_ranks(plan, context)
    placed = place_plan(plan.ranks, context.prepared, context.job, context.space.whole)
    _check_shards(placed, context, options)  # before features are computed for hours
    resolved = resolve_run(plan.ranks, strategy, context, placed)
    run = project.new_run()
    record_process(run, context.space)
    run.save_manifest(build_manifest(plan, strategy.name, strategy.cut, resolved))
    spec = build_spec(
        resolved,
        run,
        options,
        num_checkpoints=options.num_checkpoints or NUM_CHECKPOINTS,
        step_file=str(project.step_file(run)),
        manifest=store_manifest(run, context.space),
    )
    save_text(run.spec, to_json(spec))
    return run_to_end(resolved, spec, run, options)


def _check_shards(placed: Sequence[Placed], context: RunContext, options: TrainOptions) -> None:
    """Warn of batches that are larger than an epoch. Raise InputError for too few nodes."""
    for shard in placed:
        if (size := shard.batch_size) > shard.num_samples:
            larger = f"its batch size {size:,}, to which the learning rate is scaled, is larger"
            context.events.say(f"{shard.name} has {shard.num_samples:,} samples: {larger}")
    if options.min_nodes is not None and 1 < len(placed) <= options.min_nodes:
        problem = f"{option('min_nodes')} {options.min_nodes}, but {len(placed) - 1} nodes take part"
        raise InputError(problem, remedy="pass a smaller number")


def resume(run: RunDirectory, strategy: Strategy, context: RunContext, options: TrainOptions) -> RunSummary:
    """Continue `run` from its last completed step, or its newest checkpoint. Raises what `train` raises.

    Ranks on nodes outside the fleet stay absent. The others take over their public samples.
    """
    before, manifest = load_spec(run), run.read_manifest()
    check_data(run, before, manifest, context)
    if before.code != context.prepared.model.user_code:
        context.events.say(
            f"the job's own code has changed since run {run.run_id} began; the changed code is used"
        )
    record_process(run, context.space)
    # No rank and no path of spec.json is used: they follow from the project and the data as they are now.
    resolved = resolve_run(manifest.plan.ranks, strategy, context, manifest.placed)
    interval_s = options.checkpoint_interval_s or before.checkpoint_interval_s
    spec = build_spec(
        resolved,
        run,
        replace(options, checkpoint_interval_s=interval_s),
        num_checkpoints=options.num_checkpoints or before.num_checkpoints,
        step_file=str(context.space.project.step_file(run)),
        manifest=store_manifest(run, context.space),
    )
    check_same(run, before, spec)
    save_epochs(run, before, context.job.recipe.epochs)
    return run_to_end(resolved, spec, run, options)


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
    fleet, plan = check_files(request, events.say)
    min_nodes = request.options.min_nodes
    with open_workspace(request.directory, fleet, "train", say=events.say, min_nodes=min_nodes) as space:
        choice = _choose(request, plan, space, events)
        _examine(request, space, events)
        recorded = load_prepared(space.project, request.job)
    recipe = request.job.recipe
    rules = recipe.early_stopping, recipe.reduce_on_plateau
    for name in (rule.monitor.removeprefix("validation_") for rule in rules if rule):
        if name not in ("loss", *recipe.metrics):
            events.say(f"warning: {name!r} is monitored: `train` fails unless the model has this metric")
    strategy, num_samples = choice.strategy, recorded.num_samples if recorded else None
    return Rehearsal(choice.plan, strategy.name, strategy.cut, choice.run, num_samples)
