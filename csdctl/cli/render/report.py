"""The report of a run, as tables and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from csdctl.cli.console import PrintableConsole
from csdctl.cli.render.privacy import format_epsilon
from csdctl.cli.streams import Streams
from csdctl.reporting.numbers import format_accuracy, format_loss, format_rate, format_seconds, format_share
from csdctl.reporting.summary import RunSummary
from csdctl.runs.directory import RunDirectory
from csdctl.tuning.ways import DATA_PARALLEL, SPLIT

REACHABLE = {DATA_PARALLEL: "the ranks reach alone", SPLIT: "the busiest rank reaches without waiting"}
IDENTICAL = "identical on all ranks at the end of every epoch"


def show_report(streams: Streams, run: RunDirectory, summary: RunSummary) -> None:
    """Print the report of `run`."""
    if streams.is_json:
        streams.result(report_document(summary, str(run.path)))
        return
    render_report(streams.console, summary)
    streams.say(f"run directory: {run.path}")


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
    accuracies = format_accuracy(summary.validation_accuracy), format_accuracy(summary.accuracy)
    rows = [
        ("samples/s", _speed(summary)),
        ("efficiency", _efficiency(summary)),
        ("accuracy", f"{accuracies[0]} validation, {accuracies[1]} training"),
        ("loss", f"{format_loss(summary.validation_loss)} validation, {format_loss(summary.loss)} training"),
        (
            "trained",
            f"{summary.epochs} epochs, {summary.steps:,} steps of {summary.global_batch}, "
            f"{summary.samples:,} samples in {format_seconds(summary.training_s)}",
        ),
        ("weights", IDENTICAL if summary.identical_weights else "NOT compared"),
    ]
    if summary.privacy:
        rows += [("privacy", line) for line in format_epsilon(summary.privacy)]
    if summary.lost_nodes:
        unread = (
            f"; {summary.num_private_unread:,} private samples were not read"
            if summary.num_private_unread
            else ""
        )
        rows.append(("lost", f"{', '.join(summary.lost_nodes)}; training continued without them{unread}"))
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
    if summary.efficiency is None or summary.way not in REACHABLE:
        why = "no rank was measured alone" if summary.way == DATA_PARALLEL else f"way {summary.way}"
        return f"unknown: {why} (method {summary.method})"
    alone = format_rate(summary.alone_samples_per_s)
    return f"{format_share(summary.efficiency)} of the {alone} samples/s that {REACHABLE[summary.way]}"


def report_document(summary: RunSummary, run_path: str) -> dict[str, Any]:
    """Return the `csdctl.report/1` document."""
    document = {"schema": "csdctl.report/1", "path": run_path, **asdict(summary)}
    for shown, rank in zip(document["ranks"], summary.ranks, strict=True):
        shown["waiting"] = rank.waiting
    return document
