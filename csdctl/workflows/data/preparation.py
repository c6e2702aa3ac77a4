"""`prepare`: the data sets and the model of a job, on all machines of a fleet."""

from pathlib import Path

from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.workflows.data.prepare import OnPrepareProgress, Prepared, prepare_job
from csdctl.workflows.data.sample_placement import place_sample
from csdctl.workflows.workspace.workspace import open_workspace


def prepare_fleet(
    job: Job, fleet: Fleet, *, directory: Path, sample: str, say: Say, on_progress: OnPrepareProgress
) -> Prepared:
    """Prepare `job` on the host and all nodes of `fleet`; fill its data paths with `sample` first, if named.

    Raises InputError when model and data do not fit together, and CsdctlError when a machine fails.
    """
    with open_workspace(directory, fleet, "prepare") as space:
        if sample:
            place_sample(sample, job, space.fleet, space.sessions, space.project, say)
        return prepare_job(job, space.fleet, space.sessions, space.project, say, on_progress, is_checked=True)
