"""`train`: choose plan or run, examine the machines, prepare, then train a new run or resume one.

A run succeeds when every rank that takes part has sent a completion record. `extract` computes the features
of a job's samples ahead of training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.documents import save_text
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.mpirun import find_mpirun
from csdctl.placement.equation1 import steps_per_epoch
from csdctl.reporting.privacy import check_accountant
from csdctl.reporting.results import RunSummary, read_results
from csdctl.runs.directory import Manifest, ProjectDirectory, RunDirectory
from csdctl.tuning.plan import FEATURES, SPLIT, Plan, load_plan
from csdctl.worker.protocol.json_codec import to_json
from csdctl.workflows.data.prepare import DeliveryObserver, PreparationObserver, load_prepared, prepare_in
from csdctl.workflows.preflight.doctor import DoctorOptions, Examination, examine
from csdctl.workflows.train.options import AUTO, TrainOptions
from csdctl.workflows.train.plan import check_plan, resolve_plan
from csdctl.workflows.train.resume import find_resumable, is_complete, load_spec, resume, strategy_of
from csdctl.workflows.train.run import RunObserver, record_process, run_to_end
from csdctl.workflows.train.spec import (
    RunContext,
    build_manifest,
    build_training,
    describe_strategy,
    place_plan,
    plan_reading,
)
from csdctl.workflows.train.strategies.features import FeatureRun, Features, compute_features, find_features
from csdctl.workflows.train.strategies.strategy import Split, Strategy
from csdctl.workflows.workspace.workspace import Workspace, open_workspace


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
        given = {
            "plan": self.plan_path,
            "batch-size": self.batch_size,
            "strategy": self.options.strategy != AUTO,
        }
        for first, value, others, why in (
            ("plan", self.plan_path, ["batch-size"], "a plan has the batch size of each rank"),
            ("resume", self.resume, given, "a run continues as it began"),
        ):
            for other in others:
                if value and given[other]:
                    problem = f"--{first} and --{other} contradict each other: {why}"
                    raise InputError(problem, remedy="give one of them")

    def check_files(self) -> None:
        """Check run and plan as far as that needs no machine: before any is contacted.

        Raises InputError for one that does not exist, or does not fit job and fleet.
        """
        project = ProjectDirectory(self.directory)
        if self.resume:
            find_resumable(project, self.resume, self.job, self.fleet, lambda line: None)
        elif not self.batch_size:
            plan = load_plan(self.plan_path or project.plan(self.job.name))
            check_plan(plan, self.job, self.fleet, {})


@dataclass(frozen=True)
class TrainResult:
    """The run and its results."""

    directory: RunDirectory
    summary: RunSummary
    was_complete: bool = False
    """Nothing was left to resume."""


class TrainObserver(RunObserver, Protocol):
    """Shows one `csdctl train` from its start to its end."""

    def on_preflight(self, examination: Examination, /) -> None:
        """The machines have been examined."""


def run_training(request: TrainRequest, observer: TrainObserver) -> TrainResult:
    """Train a new run, or resume one; raises CsdctlError, and RunStopped when the user stops it."""
    find_mpirun()
    request.check_files()
    if request.job.noise:
        check_accountant()
    with open_workspace(
        request.directory, request.fleet, "train", is_locking=True, say=observer.say
    ) as space:
        if request.resume:
            run = find_resumable(space.project, request.resume, request.job, space.fleet, observer.say)
            if is_complete(run, request.job):
                return TrainResult(run, read_results(run).summary, was_complete=True)
        else:
            plan = _resolve_plan(request, space, observer)
        _examine(request, space, observer)
        prepared = prepare_in(space, request.job, observer)
        context = RunContext(request.job, prepared, space, observer, observer.on_delivery)
        if request.resume:
            return TrainResult(run, resume(run, context, request.options, observer))
        summary = train(plan, context, request.options, observer)
        return TrainResult(space.project.find_run(summary.run_id), summary)


def choose_strategy(options: TrainOptions, plan: Plan) -> Strategy:
    """Return the strategy that the user asks for; without one, that of `plan`."""
    name = plan.strategy if options.strategy == AUTO else options.strategy
    if name == SPLIT:
        cut = options.cut or (plan.cut if plan.strategy == SPLIT else "")
        return Split(cut, options.num_micro_batches)
    return Features(options.features) if name == FEATURES else Strategy()


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


def rehearse_training(request: TrainRequest, observer: TrainObserver) -> Rehearsal:
    """Choose plan or run and examine the machines as `run_training` does, without preparing or training."""
    find_mpirun()
    request.check_files()
    with open_workspace(request.directory, request.fleet, "train") as space:
        run = None
        if request.resume:
            run = find_resumable(space.project, request.resume, request.job, space.fleet, observer.say)
            plan, strategy = Manifest.model_validate(run.load_manifest()).plan, strategy_of(load_spec(run))
        else:
            plan = _resolve_plan(request, space, observer)
            strategy = choose_strategy(request.options, plan)
        _examine(request, space, observer)
        recorded = load_prepared(space.project, request.job)
    return Rehearsal(plan, strategy.name, strategy.cut, run, recorded.num_samples if recorded else None)


def _resolve_plan(request: TrainRequest, space: Workspace, observer: PreparationObserver) -> Plan:
    path, batch_size = request.plan_path, request.batch_size
    return resolve_plan(request.job, space, observer.say, path=path, batch_size=batch_size)


def _examine(request: TrainRequest, space: Workspace, observer: TrainObserver) -> None:
    if not request.is_preflight_skipped:
        examination = examine(space.fleet, space.project.root, DoctorOptions(), sessions=space.sessions)
        observer.on_preflight(examination)
        examination.check_before_training()


def train(plan: Plan, context: RunContext, options: TrainOptions, observer: RunObserver) -> RunSummary:
    """Train a new run to its end.

    Raises RunError, DeadlineError or InputError when it fails, RunStopped when the user stops it. The caller
    has locked the machines and called `plan.check_plan`.
    """
    job, prepared, space = context.job, context.prepared, context.space
    strategy = choose_strategy(options, plan)
    plan = strategy.choose_ranks(plan, context)
    placed = place_plan(plan, prepared, job, space.fleet)
    run = space.project.new_run()
    record_process(run, space)
    manifest = build_manifest(job, plan, placed, prepared, space)
    run.save_manifest(manifest | describe_strategy(plan, strategy.name, strategy.cut))
    inputs = build_training(run, plan.ranks, placed, context, options)
    inputs = strategy.build_inputs(inputs, context)
    save_text(run.spec, to_json(inputs.spec))
    return run_to_end(inputs, steps_per_epoch(placed), space, options, observer)


def extract(request: TrainRequest, observer: DeliveryObserver) -> FeatureRun:
    """Compute the features that are missing, on the machines of the plan; raises InputError, PartialError."""
    request.check_files()
    with open_workspace(
        request.directory, request.fleet, "extract", is_locking=True, say=observer.say
    ) as space:
        plan = _resolve_plan(request, space, observer)
        prepared = prepare_in(space, request.job, observer)
        find_features(prepared)
        context = RunContext(request.job, prepared, space, observer, observer.on_delivery)
        return compute_features(plan_reading(plan, context), context, request.options.features)
