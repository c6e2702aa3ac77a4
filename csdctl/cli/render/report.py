"""The report of a run, as a table and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from csdctl.cli.render.numbers import format_accuracy, format_loss, format_rate, format_seconds, format_share
from csdctl.cli.render.privacy import format_epsilon
from csdctl.reporting.summary import RunSummary


def render_report(console: Console, summary: RunSummary) -> None:
    """Per rank, then the whole."""
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
    console.print(table)
    whole = Table.grid(padding=(0, 2))
    for name, value in _whole(summary):
        whole.add_row(name, value)
    console.print(whole)
    for failure in summary.failures:
        console.print(f"failed: {failure}", style="red", markup=False)


def _whole(summary: RunSummary) -> list[tuple[str, str]]:
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
        (
            "weights",
            "identical on all ranks at every epoch's end" if summary.identical_weights else "NOT compared",
        ),
    ]
    if summary.privacy:
        rows += [("privacy", line) for line in format_epsilon(summary.privacy)]
    if summary.lost_nodes:
        unread = (
            f"; {summary.num_private_unread:,} private samples were not read"
            if summary.num_private_unread
            else ""
        )
        rows.append(("lost", f"{', '.join(summary.lost_nodes)}, and the others went on{unread}"))
    if summary.num_rebalanced:
        rows.append(("balance", f"batch sizes moved {summary.num_rebalanced} times"))
    return rows


def _speed(summary: RunSummary) -> str:
    speed = f"{format_rate(summary.samples_per_s)}, {format_rate(summary.step_samples_per_s)} while stepping"
    if summary.predicted_samples_per_s is None:
        return speed
    return f"{speed}, where {format_rate(summary.predicted_samples_per_s)} were predicted"


def _efficiency(summary: RunSummary) -> str:
    if summary.efficiency is None:
        return f"not known: no rank was measured alone (method {summary.method})"
    alone = format_rate(summary.alone_samples_per_s)
    return f"{format_share(summary.efficiency)} of the {alone} samples/s that the ranks reach alone"


def report_document(summary: RunSummary, run_path: str) -> dict[str, Any]:
    """The report as one JSON document."""
    document = {"schema": "csdctl.report/1", "path": run_path, **asdict(summary)}
    for shown, rank in zip(document["ranks"], summary.ranks, strict=True):
        shown["waiting"] = rank.waiting
    return document
