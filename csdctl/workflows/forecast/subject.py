"""The subject of a forecast, a network of the paper or a job on a fleet, and the forecast for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import InputError
from csdctl.job.model import load_job
from csdctl.notify import Say
from csdctl.perfmodel.published import Network
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.forecast.basis import ForecastBasis, published_basis
from csdctl.workflows.forecast.forecast import Forecast, forecast
from csdctl.workflows.forecast.request import ForecastRequest
from csdctl.workflows.workspace.partial_failure import choose_fleet


@dataclass(frozen=True)
class JobOnFleet:
    """A job file and the nodes to forecast it for; the fleet file may be missing."""

    job: Path
    fleet: Path
    limit: Sequence[str] | None = None
    exclude: Sequence[str] | None = None


def forecast_subject(
    subject: Network | JobOnFleet,
    request: ForecastRequest,
    directory: Path,
    say: Say,
    max_global_batch: int | None = None,
) -> Forecast:
    """Forecast a network of the paper, or a job of the project in `directory`.

    `max_global_batch` replaces the limit that the plan was tuned with. Raises InputError when nothing was
    measured, and what building a new model raises.
    """
    if isinstance(subject, JobOnFleet):
        basis = _job_basis(subject, directory, request.num_samples, max_global_batch, say)
    elif max_global_batch:
        raise InputError("the paper's batch sizes are fixed", remedy="leave out --max-global-batch")
    else:
        basis = published_basis(subject)
    return forecast(basis, request)


def _job_basis(
    subject: JobOnFleet,
    directory: Path,
    num_samples: int | None,
    max_global_batch: int | None,
    say: Say,
) -> ForecastBasis:
    if not subject.job.exists():
        raise InputError(
            f"{subject.job} does not exist",
            remedy=f"give a job that was tuned, or forecast without a job: --published {Network.MOBILENETV2}",
        )
    is_fleet_given = subject.fleet.exists() or subject.limit or subject.exclude
    fleet = choose_fleet(subject.fleet, subject.limit, subject.exclude) if is_fleet_given else None
    project = ProjectDirectory(directory)
    from csdctl.workflows.forecast.tuned_basis import tuned_basis  # needs numpy; the paper's figures do not

    return tuned_basis(load_job(subject.job), project, fleet, say, num_samples, max_global_batch)
