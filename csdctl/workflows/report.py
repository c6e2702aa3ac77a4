"""`report`: a run's events as numbers."""

from csdctl.reporting.summary import RunSummary, summarize
from csdctl.runs.directory import ProjectDirectory, RunDirectory


def report(project: ProjectDirectory, run_id: str | None) -> tuple[RunDirectory, RunSummary]:
    """Add up the run `run_id`, or the latest one; raises InputError when there is none."""
    run = project.find_run(run_id)
    return run, summarize(run.run_id, run.load_manifest(), (event for _, event in run.read_events()))
