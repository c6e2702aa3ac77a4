"""Runs and their reports: lists, runs of another csdctl, results, bytes that were sent, and scaling."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from csdctl.reporting import tables
from csdctl.reporting.numbers import format_bytes, format_count, format_loss, format_rate, format_seconds
from csdctl.reporting.privacy import BATCH_NORM, NOISY_REMARKS, PROMISE, REMARKS, describe_privacy
from csdctl.reporting.results import COMPLETED, FAILED, INTERRUPTED, RUNNING, STOPPED, RunResults, RunStatus
from csdctl.runs.directory import RunDirectory
from csdctl.terminal.console import PrintableConsole, build_pairs, build_table, print_rows
from csdctl.terminal.run_view import TrainingView
from csdctl.terminal.streams import Streams, document
from csdctl.worker.protocol.events import Event, event_document
from csdctl.workflows.reporting.report import PrivacyReport
from csdctl.workflows.runs.manage import StoredRun, look_at
from csdctl.workflows.workspace.event_stream import RunStarted

if TYPE_CHECKING:
    from csdctl.workflows.train.scale import SeriesPoint

STYLES = {RUNNING: "green", FAILED: "red", INTERRUPTED: "red", STOPPED: "yellow"}
"""Colour of a run by its state."""
RESUMABLE = (STOPPED, FAILED, INTERRUPTED)
"""States of runs that can be resumed."""
TO_THE_SECOND = len("20261123-081803")
"""Length of the beginning of a run's id without its microseconds."""
TEXTS = ("after", "batch sizes", "cost", "node", "rank", "remark", "run", "series", "source", "what")
"""Columns that are no numbers."""
MEANING = (
    "Anyone who sees everything a node sent during this run, as the host does, and knows all other samples "
    "can distinguish a sample on that node from any replacement only as well as ε and δ allow. Not "
    "covered: the number of samples, in total and of each class, the fingerprint that `prepare` reports, and "
    "computing times. Further runs on the same samples add to the privacy loss."
)
"""The promise of ε and δ of a run."""


def show_runs(streams: Streams, runs: Sequence[RunStatus]) -> None:
    """Print a row for each run. Its id has no microseconds where no other run began in that second."""
    if streams.is_json:
        streams.result(document("csdctl.runs/1", runs=runs))
        return
    if not runs:
        streams.say("no runs yet; `csdctl train` starts one")
        return
    now = time.time()
    seconds = [run.run_id[:TO_THE_SECOND] for run in runs]
    num_runs = Counter(seconds)
    rows = [
        (
            run.run_id if num_runs[second] > 1 else second,
            run.state + (f": {run.reason}" if run.state == COMPLETED and run.reason else ""),
            f"{run.epoch}/{run.epochs}",
            format_rate(run.samples_per_s),
            _show_metric(run.validation_loss, run.loss),
            _show_metric(run.validation_accuracy, run.accuracy),
            "–" if run.last_event_s is None else f"{format_seconds(max(0.0, now - run.last_event_s))} ago",
        )
        for run, second in zip(runs, seconds, strict=True)
    ]
    columns = ("run", "state", ">epoch", ">samples/s", ">loss", ">accuracy", ">last event")
    styles = [STYLES.get(run.state, "none") for run in runs]
    print_rows(streams.console, columns, rows, styles)


def show_removable(streams: Streams, stored: Sequence[StoredRun], named: Sequence[StoredRun]) -> list[str]:
    """Print which of the `stored` runs that rules name can be removed. Return the IDs of these."""
    for run, num_bytes, needed in named:
        streams.say(f"{run.run_id}: {run.state}, {format_bytes(num_bytes)}{needed and f', stays: {needed}'}")
    going = {run.run_id: num_bytes for run, num_bytes, needed in named if not needed}
    rest_bytes = sum(num_bytes for _, num_bytes, _ in stored) - sum(going.values())
    frees, rest_size = format_bytes(sum(going.values())), format_bytes(rest_bytes)
    streams.say(f"{format_count(going, 'run')} to remove, which frees {frees}; the others have {rest_size}")
    return [*going]


def _show_metric(validation: float | None, training: float | None) -> str:
    return format_loss(training) if validation is None else f"{format_loss(validation)} val"


def watch_run(streams: Streams, started: RunStarted, events: Iterable[tuple[float, Event]]) -> bool:
    """Show a run until it ends. Return whether it did not fail. `events` come with their Unix time."""
    run, event_s, read_s = started.run, time.time(), time.monotonic()
    try:
        # The clock of the view: the time of the latest event, and what has passed since.
        with TrainingView(streams.views, started, lambda: event_s + time.monotonic() - read_s) as view:
            for time_s, event in events:
                event_s, read_s = time_s, time.monotonic()
                streams.result_line(event_document(event))
                view.show(event)
    except KeyboardInterrupt:
        streams.say(f"run {run.run_id} continues; to stop it: csdctl runs stop {run.run_id}")
        raise
    status = look_at(run)
    streams.say(f"run {run.run_id}: {status.state}; `csdctl report {run.run_id}` shows the results")
    _say_resumable(streams, status)
    return status.state not in (FAILED, INTERRUPTED)


def _say_resumable(streams: Streams, run: RunStatus) -> None:
    if run.state in RESUMABLE:
        streams.say(f"to resume: csdctl train --resume {run.run_id}")


def show_stopped(streams: Streams, run: RunStatus) -> None:
    """Print what a run that was stopped has come to."""
    streams.say(f"run {run.run_id}: {run.state}, at epoch {run.epoch} of {run.epochs}")
    _say_resumable(streams, run)
    streams.result(document("csdctl.runs.stop/1", run))


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
    console.print(build_pairs(tables.write_headline(run).items()))
    for table in (tables.tabulate_ranks(run.summary), tables.tabulate_faults(run)):
        if table.rows:
            console.print(_build_data_table("", table))
    console.print(build_pairs(tables.describe_run(run.summary)))
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


def show_series(streams: Streams, kind: str, series: tables.ScalingSeries) -> None:
    """Print one series of `scale`, as a table or as one line of JSON."""
    streams.result_line(document("csdctl.scaling/1", series))
    streams.say(f"\n{kind} scaling")
    streams.console.print(_build_data_table(tables.describe_scaling(series), tables.tabulate_scaling(series)))


def show_points(streams: Streams, points: "Sequence[SeriesPoint]") -> None:
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
    table = tables.DataTable(("nodes", "series", "batch sizes", "run"), tuple(rows))
    streams.console.print(_build_data_table("scaling series", table))


def _build_data_table(title: str, table: tables.DataTable) -> Table:
    columns = [name if name in TEXTS else f">{name}" for name in table.header]
    return build_table(columns, table.rows, title=title)
