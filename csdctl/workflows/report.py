"""`report`: a run's events as numbers, and the ledger's lines as sums."""

from csdctl.reporting.privacy import Flow, add_flows
from csdctl.reporting.summary import RunSummary, summarize
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.ledger import read_ledger


def report(project: ProjectDirectory, run_id: str | None) -> tuple[RunDirectory, RunSummary]:
    """Add up the run `run_id`, or the latest one; raises InputError when there is none."""
    run = project.find_run(run_id)
    return run, summarize(run.run_id, run.load_manifest(), (event for _, event in run.read_events()))


def privacy(project: ProjectDirectory, run_id: str | None) -> tuple[RunDirectory, list[Flow], list[Flow]]:
    """The run (default: the latest), what was sent in it, and what in all commands; raises InputError."""
    run = project.find_run(run_id)
    entries = list(read_ledger(project.ledger))
    return run, add_flows(entries, run.run_id), add_flows(entries)
