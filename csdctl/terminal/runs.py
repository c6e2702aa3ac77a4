"""Runs as tables and as JSON, and a run that another csdctl trains."""

import time
from collections.abc import Iterable, Sequence

from csdctl.reporting.numbers import format_loss, format_rate, format_seconds
from csdctl.reporting.results import COMPLETED, FAILED, INTERRUPTED, RUNNING, STOPPED, RunStatus
from csdctl.terminal.console import build_table
from csdctl.terminal.run_view import TrainingView
from csdctl.terminal.streams import Streams, document
from csdctl.worker.protocol.events import Event, event_document
from csdctl.workflows.runs.manage import look_at
from csdctl.workflows.workspace.event_stream import RunStarted

STYLES = {RUNNING: "green", FAILED: "red", INTERRUPTED: "red", STOPPED: "yellow"}
"""Colour of a run by its state."""
RESUMABLE = (STOPPED, FAILED, INTERRUPTED)
"""States of runs that can be resumed."""
TO_THE_SECOND = len("20261123-081803")
"""Length of the beginning of a run's id without its microseconds."""


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
    rows = [
        (
            run.run_id if seconds.count(second) > 1 else second,
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
    table = build_table(columns, rows, styles=styles, gap=1)
    table.columns[0].min_width = max(len(row[0]) for row in rows)  # what is typed
    streams.console.print(table)


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
