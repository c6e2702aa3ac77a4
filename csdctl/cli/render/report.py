"""The report of a run, as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.privacy import format_epsilon
from csdctl.cli.streams import Streams
from csdctl.errors import InputError
from csdctl.fleet.names import format_node_names
from csdctl.reporting.energy import describe_energy, energy_document
from csdctl.reporting.numbers import (
    format_bytes,
    format_loss,
    format_rate,
    format_seconds,
    format_share,
    name_metrics,
)
from csdctl.reporting.summary import RunSummary
from csdctl.runs.directory import RunDirectory
from csdctl.tuning.strategies import DATA_PARALLEL, SPLIT

REACHABLE = {DATA_PARALLEL: "the ranks reach alone", SPLIT: "the busiest rank reaches without waiting"}
IDENTICAL = "identical on all ranks at the end of every epoch"


def show_report(streams: Streams, run: RunDirectory, summary: RunSummary) -> None:
    """Print the report of `run`."""
    if streams.is_json:
        streams.result(report_document(summary, str(run.path)))
        return
    render_report(streams.console, summary)
    streams.say(f"run directory: {run.path}")


def show_reports(streams: Streams, reports: Sequence[tuple[RunDirectory, RunSummary]]) -> None:
    """Print the reports of several runs."""
    if streams.is_json:
        documents = [report_document(summary, str(run.path)) for run, summary in reports]
        streams.result({"schema": "csdctl.reports/1", "runs": documents})
        return
    for _, summary in reports:
        render_report(streams.console, summary)


def show_files(streams: Streams, paths: Sequence[Path]) -> None:
    """Say which files were written."""
    if streams.is_json:
        streams.result({"schema": "csdctl.report-files/1", "files": [str(path) for path in paths]})
    for path in paths:
        streams.say(f"wrote {path} ({format_bytes(path.stat().st_size)})")


def check_report_options(run_ids: Sequence[str], *, is_privacy: bool, has_files: bool) -> None:
    """Raise InputError for options that exclude each other."""
    if is_privacy and (has_files or len(run_ids) > 1):
        raise InputError(
            "--privacy shows one run in the terminal; received more runs, --html or --csv",
            remedy="leave out --privacy: the HTML report has bytes by class too",
        )


def render_report(console: PrintableConsole, summary: RunSummary) -> None:
    """Print a row for each rank, then the totals."""
    console.print(report_of(summary))
    for failure in summary.failures:
        console.print(f"failed: {failure}", style="red")


def report_of(summary: RunSummary) -> Group:
    """Return the tables of a report."""
    title = f"run {summary.run_id}: {summary.state}" + (" (emulated fleet)" if summary.emulated else "")
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("node")
    for column in ("batch size", "private", "public", "samples/s", "alone", "waiting"):
        table.add_column(column, justify="right")
    for rank in summary.ranks:
        table.add_row(
            str(rank.rank),
            rank.node,
            str(rank.batch_size),
            f"{rank.num_private:,}",
            f"{rank.num_public:,}",
            format_rate(rank.samples_per_s),
            format_rate(rank.alone_samples_per_s),
            format_share(rank.waiting),
        )
    totals = Table.grid(padding=(0, 2))
    for name, value in _totals(summary):
        totals.add_row(name, value)
    return Group(table, totals)


def _totals(summary: RunSummary) -> list[tuple[str, str]]:
    training = name_metrics(summary.accuracy, summary.metrics)
    validation = name_metrics(summary.validation_accuracy, summary.validation_metrics)
    metrics = [
        (name, f"{format_loss(validation.get(name))} validation, {format_loss(training.get(name))} training")
        for name in {**training, **validation}
    ]
    rows = [
        ("samples/s", _speed(summary)),
        ("efficiency", _efficiency(summary)),
        *metrics,
        ("loss", f"{format_loss(summary.validation_loss)} validation, {format_loss(summary.loss)} training"),
        (
            "trained",
            f"{summary.epochs} epochs, {summary.steps:,} steps of {summary.global_batch}, "
            f"{summary.samples:,} samples in {format_seconds(summary.training_s)}",
        ),
        ("weights", IDENTICAL if summary.identical_weights else "NOT compared"),
    ]
    if summary.energy:
        rows += [("energy", line) for line in describe_energy(summary.energy)]
    if summary.privacy:
        rows += [("privacy", line) for line in format_epsilon(summary.privacy)]
    if summary.lost_nodes:
        unread = (
            f"; {summary.num_private_unread:,} private samples were not read"
            if summary.num_private_unread
            else ""
        )
        rows.append(
            ("lost", f"{format_node_names(summary.lost_nodes)}; training continued without them{unread}")
        )
    if summary.num_unreadable:
        rows.append(("events", f"{summary.num_unreadable:,} lines could not be read, and are left out"))
    if summary.num_rebalanced:
        rows.append(("balance", f"batch sizes changed {summary.num_rebalanced} times"))
    return rows


def _speed(summary: RunSummary) -> str:
    speed = f"{format_rate(summary.samples_per_s)}, {format_rate(summary.step_samples_per_s)} while stepping"
    if summary.predicted_samples_per_s is None:
        return speed
    return f"{speed}; predicted {format_rate(summary.predicted_samples_per_s)}"


def _efficiency(summary: RunSummary) -> str:
    if summary.efficiency is None or summary.strategy not in REACHABLE:
        why = (
            "no rank was measured alone"
            if summary.strategy == DATA_PARALLEL
            else f"strategy {summary.strategy}"
        )
        return f"unknown: {why} (method {summary.method})"
    alone = format_rate(summary.alone_samples_per_s)
    return f"{format_share(summary.efficiency)} of the {alone} samples/s that {REACHABLE[summary.strategy]}"


def report_document(summary: RunSummary, run_path: str) -> dict[str, Any]:
    """Return the `csdctl.report/1` document."""
    document = {"schema": "csdctl.report/1", "path": run_path, **asdict(summary)}
    for shown, rank in zip(document["ranks"], summary.ranks, strict=True):
        shown["waiting"] = rank.waiting
    if summary.energy:
        document["energy"] = energy_document(summary.energy)
    return document
