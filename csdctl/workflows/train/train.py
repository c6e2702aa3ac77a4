"""`train`: choose plan or run, examine the machines, prepare, then train a new run or resume one.

A run succeeds when every rank that takes part has sent a completion record. `extract` computes the features
of a job's samples ahead of training.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.documents import save_json, save_text
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.machine_lock import describe_holder
from csdctl.launch.mpirun import find_mpirun
from csdctl.placement.equation1 import steps_per_epoch
from csdctl.reporting.privacy import check_accountant
from csdctl.reporting.results import RunSummary
from csdctl.runs.directory import Manifest, RunDirectory
from csdctl.shipping.deliver import Delivery
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.json_codec import to_json
from csdctl.workflows.data.deploy import cut_shards
from csdctl.workflows.data.prepare import PreparationObserver, Prepared, prepare_in
from csdctl.workflows.data.prepared_record import load_prepared
from csdctl.workflows.preflight.doctor import DoctorOptions, Examination, examine
from csdctl.workflows.reporting.report import report
from csdctl.workflows.train.options import AUTO, TrainOptions
from csdctl.workflows.train.plan import GIVE_ONE, check_one_source, resolve_plan
from csdctl.workflows.train.resume import find_resumable, is_complete, load_spec, resume
from csdctl.workflows.train.run import RunInputs, RunObserver, run_to_end
from csdctl.workflows.train.spec import (
    build_manifest,
    build_spec,
    describe_strategy,
    place_plan,
    plan_reading,
)
from csdctl.workflows.train.strategies.choice import choose_strategy, strategy_of
from csdctl.workflows.train.strategies.features import FeatureRun, compute_features, find_features
from csdctl.workflows.train.strategies.strategy import RunContext
from csdctl.workflows.workspace.workspace import Workspace, open_workspace

_CONTINUED = "a run continues as it began"
CONTRADICTIONS = (
    ("resume", "plan", _CONTINUED),
    ("resume", "batch-size", _CONTINUED),
    ("resume", "strategy", _CONTINUED),
)


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
        check_one_source(self.plan_path, self.batch_size)
        given = {
            "resume": self.resume,
            "plan": self.plan_path,
            "batch-size": self.batch_size,
            "strategy": "" if self.options.strategy == AUTO else self.options.strategy,
        }
        for first, second, why in CONTRADICTIONS:
            if given[first] and given[second]:
                raise InputError(f"--{first} and --{second} contradict each other: {why}", remedy=GIVE_ONE)


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
    if request.job.noise:
        check_accountant()
    with open_workspace(
        request.directory, request.fleet, "train", is_locking=True, say=observer.say
    ) as space:
        if request.resume:
            run = find_resumable(space.project, request.resume, request.job, space.fleet, observer.say)
            return _resume(run, request, space, observer)
        return _train(request, space, observer)


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
    with open_workspace(request.directory, request.fleet, "train") as space:
        run = None
        if request.resume:
            run = find_resumable(space.project, request.resume, request.job, space.fleet, observer.say)
            plan, strategy = Manifest.model_validate(run.load_manifest()).plan, strategy_of(load_spec(run))
        else:
            plan = resolve_plan(
                request.job, space, observer.say, path=request.plan_path, batch_size=request.batch_size
            )
            strategy = choose_strategy(request.options, plan)
        _examine(request, space, observer)
        recorded = load_prepared(space.project, request.job)
    return Rehearsal(plan, strategy.name, strategy.cut, run, recorded.num_samples if recorded else None)


def _train(request: TrainRequest, space: Workspace, observer: TrainObserver) -> TrainResult:
    plan = resolve_plan(
        request.job, space, observer.say, path=request.plan_path, batch_size=request.batch_size
    )
    prepared = _examine_and_prepare(request, space, observer)
    summary = train(request.job, plan, prepared, space, request.options, observer)
    return TrainResult(space.project.find_run(summary.run_id), summary)


def _resume(
    run: RunDirectory, request: TrainRequest, space: Workspace, observer: TrainObserver
) -> TrainResult:
    if is_complete(run, request.job):
        return TrainResult(*report(space.project, run.run_id), was_complete=True)
    prepared = _examine_and_prepare(request, space, observer)
    return TrainResult(run, resume(run, request.job, prepared, space, request.options, observer))


def _examine_and_prepare(request: TrainRequest, space: Workspace, observer: TrainObserver) -> Prepared:
    _examine(request, space, observer)
    return prepare_in(space, request.job, observer)


def _examine(request: TrainRequest, space: Workspace, observer: TrainObserver) -> None:
    if not request.is_preflight_skipped:
        examination = examine(space.fleet, space.project.root, DoctorOptions(), sessions=space.sessions)
        observer.on_preflight(examination)
        examination.check_before_training()


def train(
    job: Job, plan: Plan, prepared: Prepared, space: Workspace, options: TrainOptions, observer: RunObserver
) -> RunSummary:
    """Train a new run to its end.

    Raises RunError, DeadlineError or InputError when it fails, RunStopped when the user stops it. The caller
    has locked the machines and called `plan.check_plan`.
    """
    context = RunContext(job, prepared, space, observer, observer.on_delivery)
    strategy = choose_strategy(options, plan)
    plan = strategy.choose_ranks(plan, context)
    placed = place_plan(plan, prepared, job, space.fleet)
    run = space.project.new_run()
    save_json(run.process, describe_holder("train", space.project.root))
    manifest = build_manifest(job, plan, placed, prepared, space)
    run.save_manifest(manifest | describe_strategy(plan, strategy.name, strategy.cut))
    shards = cut_shards(placed, prepared.public, job, space.project)
    spec = dataclasses.replace(
        build_spec(run, job, plan.ranks, placed, prepared, shards, space),
        step_file=str(space.project.step_file(run)),
        is_balanced=options.is_balanced,
        checkpoint_interval_s=options.checkpoint_interval_s,
        num_checkpoints=options.num_checkpoints,
        max_steps=options.max_steps,
    )
    inputs = strategy.build_inputs(RunInputs(run, spec, prepared, shards), context)
    save_text(run.spec, to_json(inputs.spec))
    return run_to_end(inputs, steps_per_epoch(placed), space, options, observer)


class ExtractObserver(PreparationObserver, Protocol):
    """Shows one `csdctl extract`."""

    def on_delivery(self, node: str, delivery: Delivery, /) -> None:
        """Files have reached `node`."""


def extract(request: TrainRequest, observer: ExtractObserver) -> FeatureRun:
    """Compute the features that are missing, on the machines of the plan; raises InputError, PartialError."""
    job = request.job
    with open_workspace(
        request.directory, request.fleet, "extract", is_locking=True, say=observer.say
    ) as space:
        plan = resolve_plan(job, space, observer.say, path=request.plan_path, batch_size=request.batch_size)
        prepared = prepare_in(space, job, observer)
        find_features(prepared)
        spec, shards = plan_reading(plan, prepared, job, space)
        context = RunContext(job, prepared, space, observer, observer.on_delivery)
        return compute_features(spec, shards, context, request.options.features)
