"""`report`: the events of a run and the lines of the ledger, added up."""

from dataclasses import dataclass

from csdctl.reporting.differential_privacy import Privacy, measure_privacy
from csdctl.reporting.privacy import Flow, add_flows
from csdctl.reporting.summary import RunSummary, summarize
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.ledger import read_ledger


def report(project: ProjectDirectory, run_id: str | None) -> tuple[RunDirectory, RunSummary]:
    """Add up run `run_id`, or the latest run; raises InputError when it does not exist."""
    run = project.find_run(run_id)
    return run, summarize(run.run_id, run.load_manifest(), (event for _, event in run.read_events()))


@dataclass(frozen=True)
class PrivacyReport:
    """What left the machines, and what the noise guarantees."""

    run_id: str
    of_run: list[Flow]
    of_all: list[Flow]
    """Of all commands so far."""
    privacy: Privacy | None


def privacy(project: ProjectDirectory, run_id: str | None) -> PrivacyReport:
    """Report on run `run_id`, or the latest run; raises InputError when it does not exist."""
    run = project.find_run(run_id)
    entries = list(read_ledger(project.ledger))
    events = (event for _, event in run.read_events()) if run.events.exists() else ()
    guarantee = measure_privacy(run.load_manifest(), events)
    return PrivacyReport(run.run_id, add_flows(entries, run.run_id), add_flows(entries), guarantee)
