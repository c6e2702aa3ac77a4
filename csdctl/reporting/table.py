"""A run as CSV, a row for each epoch."""

import csv
import io
from collections.abc import Sequence

from csdctl.reporting.results import RunResults
from csdctl.reporting.scaling import ScalingSeries
from csdctl.reporting.scaling_figures import scaling_document


def render_csv(runs: Sequence[RunResults]) -> str:
    """Return a header and a row for each run and epoch; a metric that was not computed is empty."""
    names = list(dict.fromkeys(name for run in runs for point in run.series.epochs for name in point.results))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("run", "state", "source", "epoch", "unix_time_s", "samples_per_s", "learning_rate")
    writer.writerow([*columns, *map(as_cell, names)])
    for run in runs:
        for point in run.series.epochs:
            rate = "" if point.learning_rate is None else point.learning_rate
            fixed = [run.summary.run_id, run.summary.state, run.measured, point.epoch, f"{point.time_s:.3f}"]
            results = [point.results.get(name, "") for name in names]
            writer.writerow([*fixed, f"{point.samples_per_s:.3f}", rate, *results])
    return text.getvalue()


def render_scaling_csv(series: ScalingSeries) -> str:
    """Return a header and a row of plain numbers for each run; what is not known is empty."""
    text = io.StringIO()
    points = scaling_document(series)["points"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*points[0], "source"])
    for point in points:
        cells = [" ".join(cell) if isinstance(cell, tuple) else cell for cell in point.values()]
        writer.writerow([*("" if cell is None else cell for cell in cells), series.origin])
    return text.getvalue()


def as_cell(name: str) -> str:
    """Return a job's or node's name as text, also where a spreadsheet would take it for a formula."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r") else name
