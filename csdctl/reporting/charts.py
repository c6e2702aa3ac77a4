"""The charts of a report, each with the data that it shows as a table."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from csdctl.errors import InputError
from csdctl.fleet.requirements import explain_extra
from csdctl.reporting.numbers import format_rate, format_seconds, format_share
from csdctl.reporting.results import RunResults
from csdctl.reporting.series import COMMUNICATION, COMPUTE, INPUT, OTHER, WAIT
from csdctl.reporting.tables import DataTable

LABELS = {
    COMPUTE: "compute",
    INPUT: "input",
    WAIT: "waiting for slower ranks",
    COMMUNICATION: "communication",
    OTHER: "evaluation, checkpoints",
}
"""What a rank spends its time on, in words."""
UNDIVIDED = {
    COMPUTE: "compute and input",
    WAIT: "waiting and communication",
    OTHER: "evaluation, checkpoints",
}
"""The same where the ranks did not tell waiting from communication."""
LABEL_CHARS = 24
"""Longer names are cut in a drawing."""
SERIES = ("#0b63b5", "#c2570c", "#d9a400", "#7a3ea1", "#8a96a3", "#0f8a6a", "#c0246a", "#5c4b37")
"""Colours of lines, in order."""
DASHES = ("-", "--", ":")
"""Styles of lines: colours repeat after 8 lines, and come back dashed."""
WIDTH_IN, HEIGHT_IN, LANE_IN = 4.2, 2.5, 0.2
"""Size of a drawing, and height of a lane, in inches."""
INK, GRID = "#1d2733", "#d5dbe1"
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.transparent": True,
    "svg.hashsalt": "csdctl",  # the same ids in every report
}
"""Settings of matplotlib. Pictures are SVG with text, in the page's own bytes: no script, no request."""
Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points x, y by name."""


@dataclass(frozen=True)
class Chart:
    """A drawing, in words too."""

    title: str
    text: str
    """What a reader sees in it."""
    draw: Callable[[], str]
    """Returns the address of the picture, which contains it."""
    data: DataTable
    legend: tuple[str, ...] = ()
    """Names in order of their colours. The page shows them, where they can wrap. None if there is one."""


def epoch_charts(runs: Sequence[RunResults]) -> list[Chart]:
    """Return a chart for each metric by epoch, with all runs in it."""
    names = dict.fromkeys(
        name.removeprefix("val_") for run in runs for point in run.series.epochs for name in point.results
    )
    return [_epoch_chart(runs, name) for name in names]


def _epoch_chart(runs: Sequence[RunResults], name: str) -> Chart:
    lines = {
        f"{run.summary.run_id} {kind}" if len(runs) > 1 else kind: points
        for run in runs
        for key, kind in ((name, "training"), (f"val_{name}", "validation"))
        if (
            points := [
                (point.epoch, point.results[key]) for point in run.series.epochs if key in point.results
            ]
        )
    }
    columns = [dict(points) for points in lines.values()]
    epochs = sorted({epoch for column in columns for epoch in column})
    rows = [
        (str(epoch), *(f"{column[epoch]:.4g}" if epoch in column else "–" for column in columns))
        for epoch in epochs
    ]
    ends = ", ".join(f"{label} {points[0][1]:.4g} to {points[-1][1]:.4g}" for label, points in lines.items())
    return Chart(
        f"{name} by epoch",
        f"From the first to the last epoch: {ends}." if len(runs) == 1 else "At the end of each epoch.",
        lambda: draw_lines(lines, "epoch", name),
        DataTable(("epoch", *lines), tuple(rows)),
        tuple(lines),
    )


def speed_chart(runs: Sequence[RunResults]) -> Chart:
    """Return the throughput over time."""
    lines = {
        run.summary.run_id if len(runs) > 1 else "all ranks": [
            ((number + 0.5) * run.series.interval_s, rate)
            for number, rate in enumerate(run.series.throughputs() if run.series.num_intervals else ())
            if rate is not None
        ]
        for run in runs
    }
    rows = [(name, f"{x:.10g}", format_rate(y)) for name, points in lines.items() for x, y in points]
    return Chart(
        "Throughput",
        "Samples of all ranks per second of step time, without evaluation, checkpoints and stops.",
        lambda: draw_lines(lines, "seconds since the start", "samples/s", from_zero=True),
        DataTable(("run", "second", "samples/s"), tuple(rows)),
        tuple(lines) if len(runs) > 1 else (),
    )


def lanes_chart(run: RunResults) -> Chart:
    """Return what each rank spent its time on."""
    series = run.series
    names = [f"{number} {node}" for number, node in enumerate(series.nodes)]
    labels = LABELS if series.is_wait_divided else UNDIVIDED
    shares = [
        {label: _shares(spent, kind, series.interval_s) for kind, label in labels.items()}
        for spent in series.spent_s
    ]
    rows = []
    for number, (name, spent) in enumerate(zip(names, series.spent_s, strict=True)):
        totals = [sum(spent[kind]) for kind in labels]
        lane_s = sum(totals) or 1.0
        cells = [f"{format_seconds(total)} ({format_share(total / lane_s)})" for total in totals]
        rows.append((name, *cells, format_seconds(series.cpu_s.get(number))))
    return Chart(
        "Time by rank",
        f"One lane per rank, one column per {format_seconds(series.interval_s)}. "
        "A gap is time in which the rank was starting, stopped or lost.",
        lambda: draw_lanes(names, shares, series.interval_s),
        DataTable(("rank", *labels.values(), "CPU time"), tuple(rows)).without_empty_columns(),
        tuple(labels.values()),
    )


def _shares(spent: Mapping[str, Sequence[float]], kind: str, interval_s: float) -> list[float]:
    """Return the share of each interval. Overlapping reports never make it exceed 1."""
    lengths_s = [max(interval_s, sum(seconds)) for seconds in zip(*spent.values(), strict=True)]
    return [seconds / length_s for seconds, length_s in zip(spent[kind], lengths_s, strict=True)]


def draw_lines(lines: Lines, x_label: str, y_label: str, *, from_zero: bool = False) -> str:
    """Draw a line for each name. One point is a dot, and short lines show their points."""

    def draw(axes: Any) -> None:
        for number, points in enumerate(lines.values()):
            style = DASHES[number // len(SERIES) % len(DASHES)]
            color, marker = SERIES[number % len(SERIES)], "o" if len(points) <= 30 else None
            x, y = [x for x, _ in points], [y for _, y in points]
            axes.plot(x, y, style, color=color, marker=marker, markersize=3, lw=1.6)
        axes.set(xlabel=x_label, ylabel=_shorten(y_label))
        if all(float(x).is_integer() for points in lines.values() for x, _ in points):
            axes.locator_params(axis="x", integer=True)  # no half epochs, no half nodes
        if from_zero:
            axes.set_ylim(0, 1.08 * max((y for points in lines.values() for _, y in points), default=0) or 1)

    return _draw(draw, HEIGHT_IN)


def draw_lanes(
    names: Sequence[str], shares: Sequence[Mapping[str, Sequence[float]]], interval_s: float
) -> str:
    """Draw a lane for each name: `shares` of the time by kind, 0…1 per interval, stacked."""

    def draw(axes: Any) -> None:
        for lane, kinds in enumerate(shares):
            top = len(names) - lane - 0.9
            base = [top] * (len(next(iter(kinds.values()))) + 1)
            x = [number * interval_s for number in range(len(base))]
            for number, values in enumerate(kinds.values()):
                heights = [*values, values[-1] if values else 0.0]
                upper = [low + 0.8 * height for low, height in zip(base, heights, strict=True)]
                axes.fill_between(x, base, upper, step="post", color=SERIES[number], linewidth=0)
                base = upper
        axes.set(xlabel="seconds since the start", ylim=(0, len(names)))
        axes.set_yticks([len(names) - lane - 0.5 for lane in range(len(names))], [*map(_shorten, names)])
        axes.grid(visible=False)

    return _draw(draw, 0.7 + LANE_IN * max(len(names), 7))


def _shorten(name: str) -> str:
    """Return a name that leaves room for the chart. Its table has all of it."""
    return name if len(name) <= LABEL_CHARS else name[: LABEL_CHARS - 1] + "…"


def _draw(draw: Callable[[Any], None], height_in: float) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a display
    except ModuleNotFoundError as error:
        raise InputError(
            "the HTML report needs matplotlib",
            remedy=f"{explain_extra('report')}; `--csv` and `--json` need nothing",
        ) from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure.add_subplot())
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(text.getvalue()).decode()}"
