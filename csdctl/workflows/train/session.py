"""One `csdctl train`: choose plan or run, examine the machines, prepare, train or resume."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.tools import find_mpirun
from csdctl.reporting.differential_privacy import check_accountant
from csdctl.reporting.summary import RunSummary
from csdctl.runs.directory import RunDirectory
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.preflight.doctor import DoctorOptions, examine_open
from csdctl.workflows.preflight.examination import Examination
from csdctl.workflows.reporting.report import report
from csdctl.workflows.train.options import TrainOptions
from csdctl.workflows.train.plan_choice import resolve_plan
from csdctl.workflows.train.preparation import PreparationObserver, prepare_in
from csdctl.workflows.train.resume import find_resumable, is_complete, resume
from csdctl.workflows.train.train import RunObserver, train
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
    if not request.is_preflight_skipped:
        examination = examine_open(space.fleet, space.sessions, space.project.root, DoctorOptions())
        observer.on_preflight(examination)
        examination.check_before_training()
    return prepare_in(space, request.job, observer)
