"""One `csdctl train`: choose plan or run, examine the machines, prepare, train or resume."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.tools import find_mpirun
from csdctl.reporting.differential_privacy import check_accountant
from csdctl.reporting.summary import RunSummary
from csdctl.runs.directory import RunDirectory
from csdctl.runs.manifest import Manifest
from csdctl.tuning.plan import Plan
from csdctl.tuning.strategies import DATA_PARALLEL, FEATURES, SPLIT
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.data.prepared_record import load_prepared
from csdctl.workflows.preflight.doctor import DoctorOptions, examine_open
from csdctl.workflows.preflight.examination import Examination
from csdctl.workflows.reporting.report import report
from csdctl.workflows.train.options import AUTO, TrainOptions, choose_planned_strategy
from csdctl.workflows.train.plan_choice import GIVE_ONE, check_one_source, resolve_plan
from csdctl.workflows.train.preparation import PreparationObserver, prepare_in
from csdctl.workflows.train.resume import find_resumable, is_complete, load_spec, resume
from csdctl.workflows.train.train import RunObserver, train
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


class TrainObserver(PreparationObserver, RunObserver, Protocol):
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
    """What one `csdctl train` would do."""

    plan: Plan
    strategy: str
    cut: str
    run: RunDirectory | None = None
    """The run that would be resumed."""
    num_samples: int | None = None
    """Of an epoch, as the job was last prepared; None: it would be prepared first."""


def rehearse_training(request: TrainRequest, observer: TrainObserver) -> Rehearsal:
    """Choose plan or run and examine the machines as `run_training` does, without preparing or training."""
    find_mpirun()
    with open_workspace(request.directory, request.fleet, "train") as space:
        run = None
        if request.resume:
            run = find_resumable(space.project, request.resume, request.job, space.fleet, observer.say)
            plan, (strategy, cut) = (
                Manifest.model_validate(run.load_manifest()).plan,
                _strategy_of(load_spec(run)),
            )
        else:
            plan = resolve_plan(
                request.job, space, observer.say, path=request.plan_path, batch_size=request.batch_size
            )
            strategy, cut = choose_planned_strategy(request.options.strategy, request.options.cut, plan)
        _examine(request, space, observer)
        recorded = load_prepared(space.project, request.job)
    return Rehearsal(plan, strategy, cut, run, recorded.num_samples if recorded else None)


def _strategy_of(spec: RunSpec) -> tuple[str, str]:
    if spec.split:
        return SPLIT, spec.split.cut
    return (FEATURES if spec.head else DATA_PARALLEL), ""


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
        examination = examine_open(space.fleet, space.sessions, space.project.root, DoctorOptions())
        observer.on_preflight(examination)
        examination.check_before_training()
