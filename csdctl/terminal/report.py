"""The reports of runs: results, bytes that were sent, and scaling, as tables and as JSON."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from csdctl.reporting.numbers import format_bytes
from csdctl.reporting.privacy import BATCH_NORM, NOISY_REMARKS, PROMISE, REMARKS, describe_privacy
from csdctl.reporting.results import RunResults
from csdctl.reporting.tables import (
    DataTable,
    ScalingSeries,
    describe_run,
    describe_scaling,
    tabulate_faults,
    tabulate_ranks,
    tabulate_scaling,
    write_headline,
)
from csdctl.runs.directory import RunDirectory
from csdctl.terminal.console import PrintableConsole, build_pairs, build_table
from csdctl.terminal.streams import Streams, document
from csdctl.workflows.reporting.report import PrivacyReport
from csdctl.workflows.train.scale import SeriesPoint

TEXTS = ("after", "batch sizes", "cost", "node", "rank", "remark", "run", "series", "source", "what")
"""Columns that are no numbers."""
MEANING = (
    "Anyone who sees everything a node sent during this run, as the host does, and knows all other samples "
    "can distinguish a sample on that node from any replacement only as well as ε and δ allow. Not "
    "covered: the number of samples, in total and of each class, the fingerprint that `prepare` reports, and "
    "computing times. Further runs on the same samples add to the privacy loss."
)
"""What ε and δ of a run promise."""


def show_reports(streams: Streams, reports: Sequence[tuple[RunDirectory, RunResults]]) -> None:
    """Print the reports of runs."""
    if streams.is_json:
        documents = [
            document("csdctl.report/1", results.summary, path=str(run.path)) for run, results in reports
        ]
        together = document("csdctl.reports/1", runs=documents)
        streams.result(together if len(documents) > 1 else documents[0])
        return
    for run, results in reports:
        render_report(streams.console, results)
        streams.say(f"run directory: {run.path}")


def show_files(streams: Streams, paths: Sequence[Path]) -> None:
    """Say which files were written."""
    streams.result(document("csdctl.report-files/1", files=paths))
    for path in paths:
        streams.say(f"wrote {path} ({format_bytes(path.stat().st_size)})")


def render_report(console: PrintableConsole, run: RunResults) -> None:
    """Print the headline, a row for each rank, the totals and the failures."""
    emulated = " (emulated fleet)" if run.summary.emulated else ""
    console.print(f"run {run.summary.run_id}{emulated}", style="bold")
    console.print(build_pairs(write_headline(run).items()))
    for table in (tabulate_ranks(run.summary), tabulate_faults(run)):
        if table.rows:
            console.print(_build_data_table("", table))
    console.print(build_pairs(describe_run(run.summary)))
    for failure in run.summary.failures:
        console.print(f"failed: {failure}", style="red")


def show_privacy(streams: Streams, report: PrivacyReport) -> None:
    """Print what left each machine, in one run and in all commands, and what it may reveal."""
    remarks = NOISY_REMARKS if report.privacy else REMARKS
    if streams.is_json:
        streams.result(document("csdctl.privacy/1", report, promise=PROMISE, remarks=remarks))
        return
    console = streams.console
    in_run = {(flow.sender, flow.receiver, flow.kind): flow.num_bytes for flow in report.of_run}
    rows = [
        (*key, format_bytes(in_run.get(key, 0)), format_bytes(flow.num_bytes))
        for flow in report.of_all
        for key in ((flow.sender, flow.receiver, flow.kind),)
    ]
    title = f"sent: run {report.run_id}, and all commands so far"
    console.print(build_table(("from", "to", "what", ">this run", ">all"), rows, title=title))
    between = [flow for flow in report.of_run if flow.is_between_servers]
    for traffic_class in dict.fromkeys(flow.kind for flow in between):
        num_bytes = sum(flow.num_bytes for flow in between if flow.kind == traffic_class)
        console.print(f"between servers in this run, {traffic_class}: {format_bytes(num_bytes)}")
    console.print(PROMISE)
    for node, place in report.readable.items():
        console.print(
            f"{node}: its private data is prepared {place}, where others can read it; "
            "`state` in fleet.yaml names another directory"
        )
    console.print("What the sent data may still reveal:")
    for traffic_class in dict.fromkeys(flow.kind for flow in report.of_all):
        console.print(f"- {traffic_class}: {remarks.get(traffic_class, 'unknown to this csdctl')}")
    for line in [*describe_privacy(report.privacy), MEANING] if report.privacy else [BATCH_NORM]:
        console.print(line)


def show_series(streams: Streams, kind: str, series: ScalingSeries) -> None:
    """Print one series of `scale`, as a table or as one line of JSON."""
    streams.result_line(document("csdctl.scaling/1", series))
    streams.say(f"\n{kind} scaling")
    streams.console.print(_build_data_table(describe_scaling(series), tabulate_scaling(series)))


def show_points(streams: Streams, points: Sequence[SeriesPoint]) -> None:
    """Print what `scale` would train."""
    described = [
        {
            "kind": point.kind,
            "num_nodes": point.num_nodes,
            "batch_sizes": point.plan.batch_sizes,
            "run": point.run.run_id if point.run else None,
        }
        for point in points
    ]
    streams.result_line(document("csdctl.scale/1", points=described))
    rows = [
        (
            str(point.num_nodes),
            point.kind,
            ", ".join(map(str, point.plan.batch_sizes)),
            point.run.run_id if point.run else "would be trained",
        )
        for point in points
    ]
    table = DataTable(("nodes", "series", "batch sizes", "run"), tuple(rows))
    streams.console.print(_build_data_table("scaling series", table))


def _build_data_table(title: str, table: DataTable) -> Table:
    columns = [name if name in TEXTS else f">{name}" for name in table.header]
    return build_table(columns, table.rows, title=title)
