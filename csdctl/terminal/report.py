"""The reports of runs: results, bytes that were sent, and scaling, as tables and as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from csdctl.reporting.energy import energy_document
from csdctl.reporting.numbers import format_bytes
from csdctl.reporting.privacy import BATCH_NORM, PROMISE, describe_privacy, remarks_on
from csdctl.reporting.results import RunResults, RunSummary
from csdctl.reporting.tables import (
    DataTable,
    ScalingSeries,
    describe_run,
    describe_series,
    energy_by_nodes,
    scaling_document,
    scaling_table,
    tabulate_faults,
    tabulate_ranks,
    write_headline,
)
from csdctl.runs.directory import RunDirectory
from csdctl.terminal.console import PrintableConsole, build_pairs, build_table
from csdctl.terminal.streams import Streams
from csdctl.workflows.reporting.report import PrivacyReport
from csdctl.workflows.train.scale import Point

TEXTS = ("after", "batch sizes", "cost", "node", "rank", "remark", "run", "series", "source", "what")
"""Columns that are no numbers."""
MEANING = (
    "Anyone who sees everything a node sent during this run, as the host does, and knows all other samples "
    "can distinguish a sample on that node from any replacement only as well as ε and δ allow. Not "
    "covered: the number of samples, in total and of each class, the fingerprint that `prepare` reports, and "
    "computing times. Further runs on the same samples add to the privacy loss."
)


def show_reports(streams: Streams, reports: Sequence[tuple[RunDirectory, RunResults]]) -> None:
    """Print the reports of runs."""
    if streams.is_json:
        documents = [report_document(found.summary, str(run.path)) for run, found in reports]
        single, *others = documents
        streams.result({"schema": "csdctl.reports/1", "runs": documents} if others else single)
        return
    for run, found in reports:
        render_report(streams.console, found)
        streams.say(f"run directory: {run.path}")


def show_files(streams: Streams, paths: Sequence[Path]) -> None:
    """Say which files were written."""
    streams.result({"schema": "csdctl.report-files/1", "files": paths})
    for path in paths:
        streams.say(f"wrote {path} ({format_bytes(path.stat().st_size)})")


def render_report(console: PrintableConsole, run: RunResults) -> None:
    """Print the headline, a row for each rank, the totals and the failures."""
    console.print(
        f"run {run.summary.run_id}" + (" (emulated fleet)" if run.summary.emulated else ""), style="bold"
    )
    console.print(build_pairs(write_headline(run).items()))
    for table in (tabulate_ranks(run.summary), tabulate_faults(run)):
        if table.rows:
            console.print(_table("", table))
    console.print(build_pairs(describe_run(run.summary)))
    for failure in run.summary.failures:
        console.print(f"failed: {failure}", style="red")


def report_document(summary: RunSummary, run_path: str) -> dict[str, Any]:
    """Return the `csdctl.report/1` document."""
    return {
        "schema": "csdctl.report/1",
        "path": run_path,
        **vars(summary),
        "ranks": [{**vars(rank), "waiting": rank.waiting} for rank in summary.ranks],
        "energy": energy_document(summary.energy) if summary.energy else None,
    }


def show_privacy(streams: Streams, found: PrivacyReport) -> None:
    """Print what left each machine, or the `csdctl.privacy/1` document."""
    if not streams.is_json:
        render_privacy(streams.console, found)
        return
    remarks = remarks_on(has_noise=found.privacy is not None)
    streams.result({"schema": "csdctl.privacy/1", **vars(found), "promise": PROMISE, "remarks": remarks})


def render_privacy(console: PrintableConsole, found: PrivacyReport) -> None:
    """Print what left each machine, in one run and in all commands, and what it may reveal."""
    in_run = {(flow.sender, flow.receiver, flow.kind): flow.num_bytes for flow in found.of_run}
    rows = [
        (*key, format_bytes(in_run.get(key, 0)), format_bytes(flow.num_bytes))
        for flow in found.of_all
        for key in ((flow.sender, flow.receiver, flow.kind),)
    ]
    title = f"sent: run {found.run_id}, and all commands so far"
    console.print(build_table(("from", "to", "what", ">this run", ">all"), rows, title=title))
    between = [flow for flow in found.of_run if flow.is_between_servers]
    for traffic_class in dict.fromkeys(flow.kind for flow in between):
        num_bytes = sum(flow.num_bytes for flow in between if flow.kind == traffic_class)
        console.print(f"between servers in this run, {traffic_class}: {format_bytes(num_bytes)}")
    console.print(PROMISE)
    for node, place in found.readable.items():
        console.print(
            f"{node}: its private data is prepared {place}, where others can read it; "
            "`state` in fleet.yaml names another directory"
        )
    console.print("What the sent data may still reveal:")
    remarks = remarks_on(has_noise=found.privacy is not None)
    for traffic_class in dict.fromkeys(flow.kind for flow in found.of_all):
        remark = remarks.get(traffic_class, "unknown to this csdctl")
        console.print(f"- {traffic_class}: {remark}")
    if found.privacy is None:
        console.print(BATCH_NORM)
        return
    for line in describe_privacy(found.privacy):
        console.print(line)
    console.print(MEANING)


def show_series(streams: Streams, kind: str, series: ScalingSeries) -> None:
    """Print one series of `scale`, as tables or as one line of JSON."""
    streams.result_line(scaling_document(series))
    streams.say(f"\n{kind} scaling")
    runs = scaling_table(series)
    streams.console.print(_table(describe_series(series), runs))
    if any(point.energy for point in series.points):
        streams.console.print(_table("energy per image", energy_by_nodes(series)))


def show_points(streams: Streams, points: Sequence[Point]) -> None:
    """Print what `scale` would train."""
    described: list[dict[str, Any]] = [
        {
            "kind": point.kind,
            "num_nodes": point.num_nodes,
            "batch_sizes": point.plan.batch_sizes,
            "run": point.run.run_id if point.run else None,
        }
        for point in points
    ]
    streams.result_line({"schema": "csdctl.scale/1", "points": described})
    rows = [
        (
            str(one["num_nodes"]),
            one["kind"],
            ", ".join(map(str, one["batch_sizes"])),
            one["run"] or "would be trained",
        )
        for one in described
    ]
    data = DataTable(("nodes", "series", "batch sizes", "run"), tuple(rows))
    streams.console.print(_table("scaling series", data))


def _table(title: str, data: DataTable) -> Table:
    columns = [name if name in TEXTS else f">{name}" for name in data.header]
    return build_table(columns, data.rows, title=title)
