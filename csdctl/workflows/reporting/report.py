"""`report`: the events of a run and the lines of the ledger, added up."""

from dataclasses import dataclass
from typing import Any

from csdctl.reporting.differential_privacy import Privacy, count_passes, measure_privacy
from csdctl.reporting.privacy import Flow, add_flows
from csdctl.reporting.summary import RunSummary, summarize_run
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.runs.ledger import read_ledger
from csdctl.worker.protocol.events import Inverted


def report(project: ProjectDirectory, run_id: str | None) -> tuple[RunDirectory, RunSummary]:
    """Add up run `run_id`, or the latest run; raises InputError when it does not exist."""
    run = project.find_run(run_id)
    return run, summarize_run(run)


@dataclass(frozen=True)
class PrivacyReport:
    """What left the machines, and what the noise guarantees."""

    run_id: str
    of_run: list[Flow]
    of_all: list[Flow]
    """Of all commands so far."""
    privacy: Privacy | None
    inversion: Inverted | None
    """What a linear map recovers from the activations of a split run."""


def privacy(project: ProjectDirectory, run_id: str | None) -> PrivacyReport:
    """Report on run `run_id`, or the latest run; raises InputError when it does not exist."""
    run = project.find_run(run_id)
    entries = list(read_ledger(project.ledger))
    manifest: Any = run.load_manifest()
    nodes = [rank["node"] for rank in manifest["plan"]["ranks"]]
    events = run.read_events(nodes) if run.events.exists() else ()
    return PrivacyReport(
        run.run_id,
        add_flows(entries, run.run_id),
        add_flows(entries),
        measure_privacy(manifest, count_passes(events, len(nodes))),
        next((event for event in events if isinstance(event, Inverted)), None),
    )
