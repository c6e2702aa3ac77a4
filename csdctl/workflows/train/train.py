"""`train`: choose plan or run, examine the machines, prepare, resolve the run, and train to its end.

A run succeeds when rank 0 has sent a completion record. It is resumed from its RunSpec and manifest.
"""

from dataclasses import dataclass, replace

from csdctl.fleet.model import Fleet, keep_nodes
from csdctl.fleet.names import format_node_names
from csdctl.job.model import Job
from csdctl.launch.mpirun import find_mpirun
from csdctl.notify import Say
from csdctl.reporting.privacy import check_accountant
from csdctl.reporting.results import RunSummary, examine_results
from csdctl.runs.directory import LATEST, ProjectDirectory, RunDirectory
from csdctl.transport.commands import find_state_directory
from csdctl.tuning.plan import DATA_PARALLEL, Plan
from csdctl.workflows.data.prepare import load_absent, load_prepared, prepare_in
from csdctl.workflows.preflight.examination import examine_before_training
from csdctl.workflows.train import resume as resuming
from csdctl.workflows.train.plan import build_equal_plan, find_left_out, load_fitting_plan
from csdctl.workflows.train.request import TrainOptions, TrainRequest
from csdctl.workflows.train.resolved import RunContext
from csdctl.workflows.train.run import build_saving_spec, record_process, run_to_end, train
from csdctl.workflows.train.strategies import Strategy, choose_strategy, strategy_of
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import Workspace, open_workspace, unreachable_error


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
        resuming.take_over(ProjectDirectory(request.directory), request.resume, here, state, events.say)
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
        if choice.run and resuming.is_complete(choice.run, request.job):
            latest = RunDirectory(space.project.runs / space.project.run_ids()[-1])
            if request.resume == LATEST and latest.events.exists() and latest.first_id() == latest.run_id:
                latest.read_manifest(), resuming.load_spec(latest)  # damaged, and skipped with a warning
            return TrainResult(choice.run, examine_results(choice.run).summary, was_complete=True)
        # Before data is prepared for hours; otherwise the run itself links the machines at once.
        _examine(request, space, events, with_links=load_prepared(space.project, request.job) is None)
        context = RunContext(request.job, prepare_in(space, request.job, events), space, events)
        if choice.run:
            return TrainResult(choice.run, resume(choice.run, choice.strategy, context, request.options))
        resolved = choice.strategy.resolve(choice.plan, context, min_nodes=request.options.min_nodes or 0)
        return TrainResult(*train(resolved, request.options))


def check_files(request: TrainRequest, say: Say = lambda line: None) -> tuple[Fleet, Plan | None]:
    """Check run and plan before any machine is contacted.

    Returns the fleet without the nodes that take no part, which are reported, and the plan. There is none for
    one batch size on all machines. Raises InputError for a run or plan that does not exist, or does not fit
    job and fleet.
    """
    project, job, fleet = ProjectDirectory(request.directory), request.job, request.fleet
    if request.resume is not None:
        plan = resuming.find_resumable(project, request.resume, job, fleet, say).read_manifest().plan
        return keep_nodes(fleet, set(plan.nodes)), plan
    if request.batch_size:
        return fleet, None
    plan = load_fitting_plan(request.plan_path or project.plan(job.name), job, fleet, say)
    if left_out := find_left_out(plan, fleet):
        say(f"the plan leaves out {format_node_names(left_out)}: training is faster without them")
    return keep_nodes(fleet, {*fleet.machines} - {*left_out}), plan


@dataclass(frozen=True)
class Choice:
    """Which plan is trained by which strategy, or which run is resumed."""

    plan: Plan
    strategy: Strategy
    run: RunDirectory | None = None
    num_samples: int | None = None
    """Samples of an epoch, as the job was last prepared. None: it would be prepared first."""


def _choose(request: TrainRequest, plan: Plan | None, space: Workspace, events: EventStream) -> Choice:
    """Return the choice of plan or run, after checking that late nodes can join it."""
    if plan is None:
        plan = build_equal_plan(request.job, space.whole, space.facts, request.batch_size or 0)
    if request.resume:
        run = resuming.find_started(space.project, request.resume, lambda line: None)
        choice = Choice(plan, strategy_of(resuming.load_spec(run)), run)
    else:
        choice = Choice(plan, choose_strategy(request.options, plan))
    _check_late(request.job, choice.strategy, space, events.say)
    return choice


def _check_late(job: Job, strategy: Strategy, space: Workspace, say: Say) -> None:
    """Raise the error of nodes that cannot be reached unless they can join a run later. Tell of them."""
    if not (late := space.unreachable):
        return
    is_known = not job.private_path or late.keys() == load_absent(space.project, job, late).keys()
    is_possible = strategy.name == DATA_PARALLEL and not space.whole.networks
    if not (is_known and is_possible and late.keys() <= space.facts.keys()):
        raise unreachable_error(space.whole, late)
    for error in late.values():
        say(str(error))
    say(f"starting without {', '.join(late)}: a node joins when it becomes reachable")


def _examine(
    request: TrainRequest, space: Workspace, events: EventStream, *, with_links: bool = True
) -> None:
    if not request.is_preflight_skipped:
        examination = examine_before_training(space, with_links=with_links)
        events.emit(examination)
        examination.check_before_training()


def resume(run: RunDirectory, strategy: Strategy, context: RunContext, options: TrainOptions) -> RunSummary:
    """Continue `run` from its last completed step, or its newest checkpoint. Raises what `run_to_end` raises.

    Ranks on nodes outside the fleet stay absent. The others take over their public samples.
    """
    before, manifest = resuming.load_spec(run), run.read_manifest()
    resuming.check_data(run, before, manifest, context)
    record_process(run, context.space)
    # No rank and no path of spec.json is used: they follow from the project and the data as they are now.
    resolved = strategy.resolve(manifest.plan, context, manifest.placed)
    options = replace(
        options,
        is_balanced=before.is_balanced if options.is_balanced is None else options.is_balanced,
        checkpoint_interval_s=options.checkpoint_interval_s or before.checkpoint_interval_s,
        num_checkpoints=options.num_checkpoints or before.num_checkpoints,
    )
    spec = build_saving_spec(resolved, run, options)
    # With own code, the architecture names its job, which may change.
    if before.code != spec.code or (not spec.code and before.architecture != spec.architecture):
        changed = f"the model or the job's own code has changed since run {run.run_id} began"
        context.events.say(f"warning: {changed}; the changed one is used")
    resuming.check_same(run, before, spec)
    resuming.save_epochs(run, before, context.job.recipe.epochs)
    return run_to_end(resolved, spec, run, options)


def rehearse_training(request: TrainRequest, events: EventStream) -> Choice:
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
    return replace(choice, num_samples=recorded.num_samples if recorded else None)
