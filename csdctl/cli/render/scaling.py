"""`report --scaling` and `scale`: runs with different numbers of nodes, as tables and as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from csdctl.cli.render.training import TrainingScreen
from csdctl.cli.streams import Streams
from csdctl.errors import InputError
from csdctl.reporting.charts import DataTable
from csdctl.reporting.numbers import format_bytes
from csdctl.reporting.scaling import (
    ScalingSeries,
    describe_series,
    energy_by_nodes,
    scaling_document,
    scaling_table,
)
from csdctl.workflows.train.run import RunStopped
from csdctl.workflows.train.scale import Point
from csdctl.workflows.train.train import TrainRequest, TrainResult, run_training


def check_scaling_options(run_ids: Sequence[str], *, is_privacy: bool) -> None:
    """Raise InputError for what --scaling cannot go with."""
    if is_privacy:
        raise InputError("--scaling and --privacy exclude each other", remedy="give one of them")
    if len(run_ids) < 2:
        raise InputError(
            f"--scaling compares runs; received {len(run_ids)}",
            remedy="csdctl report --scaling RUN RUN …, one for each number of nodes",
        )


def show_scaling(streams: Streams, series: ScalingSeries, files: Sequence[Path]) -> None:
    """Print a series, and which files have it."""
    if streams.is_json:
        streams.result(_document(series, files))
    else:
        _show_tables(streams, series, files)


def show_series(streams: Streams, kind: str, series: ScalingSeries, files: Sequence[Path]) -> None:
    """Print one series of `scale`, as tables or as one line of JSON, and which files have it."""
    streams.result_line(_document(series, files))
    streams.say(f"\n{kind} scaling")
    _show_tables(streams, series, files)


def show_points(streams: Streams, points: Sequence[Point]) -> None:
    """Print what `scale` would train."""
    rows = [
        {
            "kind": point.kind,
            "num_nodes": point.num_nodes,
            "batch_sizes": point.plan.batch_sizes,
            "run": point.run.run_id if point.run else None,
        }
        for point in points
    ]
    streams.result_line({"schema": "csdctl.scale/1", "points": rows})
    table = DataTable(
        ("nodes", "series", "batch sizes", "run"),
        tuple(
            (
                str(point.num_nodes),
                point.kind,
                ", ".join(map(str, point.plan.batch_sizes)),
                point.run.run_id if point.run else "would be trained",
            )
            for point in points
        ),
    )
    streams.console.print(_table("scaling series", table))


def train_point(streams: Streams, point: Point, request: TrainRequest) -> TrainResult:
    """Train one point as `train` does, with its live view; raises what `train` raises."""
    streams.say(f"{point.kind} scaling, nodes: {point.num_nodes}, global batch {point.plan.global_batch:,}")
    screen = TrainingScreen(streams, emulated=request.fleet.emulated)
    with screen:
        try:
            result = run_training(request, screen)
        except RunStopped as stopped:
            screen.stopped(stopped)
            streams.say("the same command trains the points that are missing")
            raise
        screen.finish(result)
        return result


def _document(series: ScalingSeries, files: Sequence[Path]) -> dict[str, Any]:
    return {**scaling_document(series), "files": [str(path) for path in files]}


def _show_tables(streams: Streams, series: ScalingSeries, files: Sequence[Path]) -> None:
    runs = scaling_table(series)
    if not any(row[-1] for row in runs.rows):  # no remarks
        runs = DataTable(runs.header[:-1], tuple(row[:-1] for row in runs.rows))
    streams.console.print(_table(describe_series(series), runs))
    if any(point.energy for point in series.points):
        energy = energy_by_nodes(series)  # its rows are those of the table above, whose runs are not repeated
        without = tuple((row[0], *row[2:]) for row in energy.rows)
        streams.console.print(
            _table("energy per image", DataTable((energy.header[0], *energy.header[2:]), without))
        )
    for path in files:
        streams.say(f"wrote {path} ({format_bytes(path.stat().st_size)})")


def _table(title: str, data: DataTable) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False
    )
    for number, name in enumerate(data.header):
        is_last = number == len(data.header) - 1
        is_text = is_last or name == "run"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_last)
    for row in data.rows:
        table.add_row(*row)
    return table
