"""The charts of a report, each with the data that it shows as a table."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from csdctl.errors import InputError
from csdctl.reporting.numbers import format_rate, format_seconds, format_share
from csdctl.reporting.results import RunResults
from csdctl.reporting.series import COMMUNICATION, COMPUTE, INPUT, KINDS, OTHER, WAIT
from csdctl.reporting.tables import DataTable

MAX_LINES = 16
"""Lines of a chart; the table has all."""
SHOWN_KINDS = {
    COMPUTE: "compute",
    INPUT: "input",
    WAIT: "waiting for slower ranks",
    COMMUNICATION: "communication",
    OTHER: "evaluation, checkpoints",
}


@dataclass(frozen=True)
class Chart:
    """A drawing, in words too."""

    title: str
    text: str
    """What a reader sees in it."""
    origin: str
    """Measured, predicted or emulated."""
    draw: Callable[[], str]
    """Returns the address of the picture, which has it whole."""
    data: DataTable


def epoch_charts(runs: Sequence[RunResults]) -> list[Chart]:
    """Return a chart for each metric by epoch, with all runs in it."""
    names = dict.fromkeys(
        name.removeprefix("val_") for run in runs for point in run.series.epochs for name in point.results
    )
    return [_epoch_chart(runs, name) for name in names]


def _epoch_chart(runs: Sequence[RunResults], name: str) -> Chart:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for run in runs:
        for key, kind in ((name, "training"), (f"val_{name}", "validation")):
            points = [point for point in run.series.epochs if key in point.results]
            if points:
                label = f"{run.summary.run_id} {kind}" if len(runs) > 1 else kind
                lines[label] = ([p.epoch for p in points], [p.results[key] for p in points])
    epochs = sorted({int(epoch) for x, _ in lines.values() for epoch in x})
    values = [dict(zip(x, y, strict=True)) for x, y in lines.values()]
    rows = [(str(epoch), *(f"{v[epoch]:.4g}" if epoch in v else "–" for v in values)) for epoch in epochs]
    ends = "; ".join(f"{label}: {y[0]:.4g} to {y[-1]:.4g}" for label, (_, y) in lines.items())
    return Chart(
        f"{name} by epoch",
        f"{name} after each epoch. {ends}.",
        _origin(runs),
        lambda: draw_lines(lines, "epoch", name),
        DataTable(("epoch", *lines), tuple(rows)),
    )


def speed_chart(runs: Sequence[RunResults]) -> Chart:
    """Return the samples/s of all ranks over time."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for run in runs:
        series, name = run.series, run.summary.run_id if len(runs) > 1 else "all ranks"
        middles = [(number + 0.5) * series.interval_s for number in range(series.num_intervals)]
        rates = [sum(samples) / series.interval_s for samples in zip(*series.samples, strict=True)]
        lines[name] = middles, rates
    rows = [
        (name, f"{x:.0f}", format_rate(y))
        for name, (xs, ys) in lines.items()
        for x, y in zip(xs, ys, strict=True)
    ]
    text = "; ".join(
        f"{name}: median {format_rate(median(moving))}, at most {format_rate(max(moving))} samples/s"
        for name, (_, y) in lines.items()
        if (moving := [rate for rate in y if rate])
    )
    return Chart(
        "Samples per second",
        f"Samples that all ranks trained on per second, over time. {text}.",
        _origin(runs),
        lambda: draw_lines(lines, "seconds since the start", "samples/s", from_zero=True),
        DataTable(("run" if len(runs) > 1 else "", "second", "samples/s"), tuple(rows)),
    )


def lanes_chart(run: RunResults) -> Chart:
    """Return what each rank spent its time on."""
    series = run.series
    names = [f"{number} {node}" for number, node in enumerate(series.nodes)]
    kinds = KINDS if series.is_wait_divided else (COMPUTE, WAIT, OTHER)
    label = dict(SHOWN_KINDS)
    if not series.is_wait_divided:
        label |= {COMPUTE: "compute and input", WAIT: "waiting and communication"}
    shares = [
        {label[kind]: [min(s / series.interval_s, 1.0) for s in spent[kind]] for kind in kinds}
        for spent in series.spent_s
    ]
    totals = [{kind: sum(spent[kind]) for kind in kinds} for spent in series.spent_s]
    rows = [
        (
            name,
            *(
                f"{format_seconds(total[kind])} ({format_share(total[kind] / (sum(total.values()) or 1))})"
                for kind in kinds
            ),
            format_seconds(series.cpu_s.get(number)),
        )
        for number, (name, total) in enumerate(zip(names, totals, strict=True))
    ]
    return Chart(
        "What each rank spent its time on",
        f"One lane a rank, a column for every {format_seconds(series.interval_s)}. "
        "An empty part is time in which the rank was starting, stopped or lost.",
        run.measured,
        lambda: draw_lanes(names, shares, series.interval_s),
        DataTable(("rank", *(label[kind] for kind in kinds), "CPU time"), tuple(rows)),
    )


def sizes_chart(run: RunResults) -> Chart:
    """Return the batch sizes over time; there must be some."""
    series, changes = run.series, run.series.batch_sizes
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for rank, node in enumerate(series.nodes[:MAX_LINES]):
        x = [change.time_s - series.start_s for change in changes]
        y = [float(change.sizes.get(rank, 0)) for change in changes]
        lines[f"{rank} {node}"] = ([*x, series.end_s - series.start_s], [*y, y[-1]])
    rows = [
        (
            f"{change.time_s - series.start_s:.0f}",
            *(str(change.sizes.get(rank, 0)) for rank in range(len(series.nodes))),
        )
        for change in changes
    ]
    more = (
        f" The first {MAX_LINES} ranks are drawn; the table has all." if len(series.nodes) > MAX_LINES else ""
    )
    return Chart(
        "Batch sizes",
        f"Samples that a rank takes in a step; 0 while it is lost. Changed {len(changes) - 1} times.{more}",
        run.measured,
        lambda: draw_lines(
            lines, "seconds since the start", "samples per step", from_zero=True, in_steps=True
        ),
        DataTable(("second", *series.nodes), tuple(rows)),
    )


def _origin(runs: Sequence[RunResults]) -> str:
    return ", ".join(sorted({run.measured for run in runs}))


# Pictures are SVG by matplotlib, with text, in the page's own bytes: no script, no request.
WIDTH_IN, HEIGHT_IN, LANE_IN = 5.2, 3.0, 0.2
LEGEND_CHARS, LABEL_CHARS = 80, 24
INK, GRID = "#1d2733", "#d5dbe1"
SERIES = ("#0b63b5", "#c2570c", "#d9a400", "#7a3ea1", "#8a96a3", "#0f8a6a", "#c0246a", "#5c4b37")
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
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.transparent": True,
    "svg.hashsalt": "csdctl",  # the same ids in every report
}
DASHES = ("-", "--", ":", "-.")
MISSING = "the HTML report needs matplotlib"
REMEDY = "pip install 'csdctl[report]'; `--csv` and `--json` need nothing"
Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""x and y by name."""


def draw_lines(
    lines: Lines, x_label: str, y_label: str, *, from_zero: bool = False, in_steps: bool = False
) -> str:
    """Draw a line for each name; `in_steps`: of values that hold until the next. One point is a dot."""

    def draw(axes: Any) -> None:
        for number, (name, (x, y)) in enumerate(lines.items()):
            # Colours repeat after 8 lines, and come back dashed; short lines show their points.
            style = DASHES[number // len(SERIES) % len(DASHES)]
            color = SERIES[number % len(SERIES)]
            marker = "o" if len(x) <= 30 and not in_steps else None
            drawstyle = "steps-post" if in_steps else "default"
            axes.plot(
                x, y, style, color=color, label=_short(name), marker=marker, markersize=3, drawstyle=drawstyle
            )
        axes.set(xlabel=x_label, ylabel=_short(y_label))
        if all(float(value).is_integer() for x, _ in lines.values() for value in x):
            axes.locator_params(axis="x", integer=True)  # no half epochs, no half nodes
        if from_zero:
            axes.set_ylim(0, 1.08 * max((max(y) for _, y in lines.values() if y), default=0) or 1)
        _legend(axes, len(lines))

    return _drawn(draw, HEIGHT_IN)


def draw_lanes(
    names: Sequence[str], shares: Sequence[Mapping[str, Sequence[float]]], interval_s: float
) -> str:
    """Draw a lane for each name: `shares` of the time by kind, 0…1 per interval, one on another."""

    def draw(axes: Any) -> None:
        for lane, kinds in enumerate(shares):
            top = len(names) - lane - 0.9
            base = [top] * (len(next(iter(kinds.values()))) + 1)
            x = [number * interval_s for number in range(len(base))]
            for number, (kind, values) in enumerate(kinds.items()):
                heights = [*values, values[-1] if values else 0.0]
                upper = [low + 0.8 * height for low, height in zip(base, heights, strict=True)]
                label = kind if lane == 0 else None
                color = SERIES[number]
                axes.fill_between(x, base, upper, step="post", color=color, linewidth=0, label=label)
                base = upper
        axes.set(xlabel="seconds since the start", ylim=(0, len(names)))
        axes.set_yticks([len(names) - lane - 0.5 for lane in range(len(names))], [*map(_short, names)])
        axes.grid(visible=False)
        _legend(axes, 2)

    return _drawn(draw, 1.4 + LANE_IN * max(len(names), 7))


def _short(name: str) -> str:
    """Return a name that leaves room for the chart; its table has the whole."""
    return name if len(name) <= LABEL_CHARS else name[: LABEL_CHARS - 1] + "…"


def _legend(axes: Any, count: int) -> None:
    """Show the names above the chart, if there is more than one."""
    longest = max((len(text) for text in axes.get_legend_handles_labels()[1]), default=0)
    columns = max(1, min(4, LEGEND_CHARS // (longest + 5)))
    if count > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=8.5, handlelength=1.4)


def _drawn(draw: Callable[[Any], None], height_in: float) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a display
    except ModuleNotFoundError as error:
        raise InputError(MISSING, remedy=REMEDY) from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure.add_subplot())
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(text.getvalue()).decode()}"
