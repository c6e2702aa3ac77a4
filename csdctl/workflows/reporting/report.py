"""`report`: what runs have shown, also as HTML and CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from csdctl.documents import check_output
from csdctl.notify import Say, make_printable
from csdctl.reporting.numbers import format_count
from csdctl.reporting.page import render_page
from csdctl.reporting.privacy import Flow, Privacy, add_flows, count_passes, list_readers, measure_privacy
from csdctl.reporting.results import RUNNING, RunResults, examine_results
from csdctl.reporting.tables import describe_breaks
from csdctl.runs.directory import NUM_KILLED, ProjectDirectory, RunDirectory
from csdctl.runs.ledger import read_ledger
from csdctl.worker.protocol.durable_files import save_text
from csdctl.workflows.runs.manage import as_process_says


def render_csv(runs: Sequence[RunResults]) -> str:
    """Return a header and a row for each run and epoch. A metric that was not computed is empty."""
    names = list(dict.fromkeys(name for run in runs for point in run.series.epochs for name in point.results))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("run", "state", "source", "epoch", "unix_time_s", "samples_per_s", "learning_rate")
    writer.writerow([*columns, *map(_protect_cell, names)])
    for run in runs:
        for point in run.series.epochs:
            of_run = _protect_cell(run.summary.run_id), run.summary.state, run.measured
            throughput = "" if point.samples_per_s is None else f"{point.samples_per_s:.3f}"
            of_epoch = point.epoch, f"{point.time_s:.3f}", throughput, point.learning_rate
            writer.writerow([*of_run, *of_epoch, *(point.results.get(name) for name in names)])
    return text.getvalue()


def _protect_cell(name: str) -> str:
    """Return a name as text, also where a spreadsheet or a terminal would take it for more."""
    return f"'{make_printable(name)}" if name[:1] in {*"=+-@\t\r\n"} else make_printable(name)


def report(run: RunDirectory) -> RunResults:
    """Add up a run. Raises InputError for one without events."""
    results = examine_results(run)
    summary = as_process_says(run, results.summary)
    missing = () if summary.state == RUNNING else summary.missing_models  # they are being written
    return replace(results, summary=replace(summary, missing_models=missing))


def write_files(
    runs: Sequence[RunDirectory], html: Path | None, csv: Path | None, *, force: bool
) -> list[Path]:
    """Write reports as HTML and as CSV, and return the paths. Raises InputError for one that exists."""
    for option, path in (("--html", html), ("--csv", csv)):
        if path:
            check_output(path, option, force=force)
    results = [report(run) for run in runs]
    texts = {path: render(results) for path, render in ((html, render_page), (csv, render_csv)) if path}
    for path, text in texts.items():
        save_text(path, text)
    return [*texts]


@dataclass(frozen=True)
class PrivacyReport:
    """Data that left the machines, and the guarantee of the noise."""

    run_id: str
    of_run: list[Flow]
    of_all: list[Flow]
    """Data that all commands so far have sent."""
    privacy: Privacy | None
    readable: dict[str, str]
    """Where prepared private data can be read by others than its node's user, by node."""


def privacy(project: ProjectDirectory, run: RunDirectory, say: Say) -> PrivacyReport:
    """Report on a run of `project`. `say` tells what of the ledger cannot be read. Raises InputError."""
    manifest, path = run.read_manifest(), project.ledger
    stored = run.read_events(manifest.nodes)
    passes = count_passes((event for _, event in stored.skim()), len(manifest.nodes))
    recorded = {entry.run for entry in read_ledger(path)}
    runs = [RunDirectory(project.runs / name) for name in project.run_ids()]
    begun = [it for it in runs if it.events.exists()]
    lacking = [it for it in begun if it.first_id() not in recorded or it.load_process().get(NUM_KILLED)]
    if lacking:
        what = f"{path} lacks bytes of {format_count(len(lacking), 'run')}, the latest {lacking[-1].run_id}"
        say(f"warning: {what}: csdctl is training, was killed, or lines are lost")
    if stored.num_breaks:
        say(f"warning: {describe_breaks(stored.num_breaks, run.run_id)}")
    return PrivacyReport(
        run.run_id,
        add_flows(read_ledger(path, say), run.run_id),  # read again: a year of a large fleet fills memory
        add_flows(read_ledger(path)),
        measure_privacy(manifest, passes),
        list_readers(manifest),
    )
