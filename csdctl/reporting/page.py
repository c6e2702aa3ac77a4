"""A report as one self-contained HTML file without scripts. Each chart comes with its data as a table.

All text is escaped: names, errors and versions come from nodes and jobs. Should that fail, the page's content
security policy still refuses scripts and requests.
"""

import base64
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from csdctl.errors import InputError
from csdctl.fleet.requirements import explain_extra
from csdctl.notify import make_printable, shorten
from csdctl.reporting import tables
from csdctl.reporting.numbers import format_rate, format_seconds, format_share
from csdctl.reporting.results import RunResults
from csdctl.reporting.series import COMMUNICATION, COMPUTE, INPUT, OTHER, WAIT
from csdctl.reporting.tables import DataTable, write_headline

LABELS = {
    COMPUTE: "compute",
    INPUT: "input",
    WAIT: "waiting for slower ranks",
    COMMUNICATION: "communication",
    OTHER: "evaluation, checkpoints",
}
"""Labels of the kinds of a rank's time."""
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
"""Styles of lines, where colours repeat."""
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
"""Settings of matplotlib. Pictures are SVG with text, in the page itself: no script, no request."""
Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points x, y by name."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MAX_CELL_CHARS = 500
"""Longer texts are cut."""
NUMERIC = re.compile(r"–|[\d,.:]+( ?(%|s|ms|W|[KMGT]?i?B))?( \(\d+%\))?")
"""A cell that is a number with its unit, or unknown."""
CLASSES = ("", " class=n")
"""Attribute of a cell: of a text, and of a number."""
COLORS = f":root{{--ink:{INK};--grid:{GRID};--soft:#5a6775;--panel:#f6f8fa;--accent:{SERIES[0]}}}"
"""Colours that the stylesheet, page.css, names."""


@dataclass(frozen=True)
class Chart:
    """A chart, with its text description and data."""

    title: str
    text: str
    draw: Callable[[], str]
    """Returns the picture as a data: URL."""
    data: DataTable
    legend: tuple[str, ...] = ()
    """Names in order of their colours. The page shows them, where they can wrap."""


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
        lambda: _draw_lines(lines, "epoch", name),
        DataTable(("epoch", *lines), tuple(rows)),
        tuple(lines),
    )


def _speed_chart(runs: Sequence[RunResults]) -> Chart:
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
        lambda: _draw_lines(lines, "seconds since the start", "samples/s", from_zero=True),
        DataTable(("run", "second", "samples/s"), tuple(rows)),
        tuple(lines) if len(runs) > 1 else (),
    )


def _lanes_chart(run: RunResults) -> Chart:
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
        lambda: _draw_lanes(names, shares, series.interval_s),
        DataTable(("rank", *labels.values(), "CPU time"), tuple(rows)).without_empty_columns(),
        tuple(labels.values()),
    )


def _shares(spent: Mapping[str, Sequence[float]], kind: str, interval_s: float) -> list[float]:
    """Return the share of each interval. Overlapping reports never make it exceed 1."""
    lengths_s = [max(interval_s, sum(seconds)) for seconds in zip(*spent.values(), strict=True)]
    return [seconds / length_s for seconds, length_s in zip(spent[kind], lengths_s, strict=True)]


def _draw_lines(lines: Lines, x_label: str, y_label: str, *, from_zero: bool = False) -> str:

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


def _draw_lanes(
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
    return name if len(name) <= LABEL_CHARS else name[: LABEL_CHARS - 1] + "…"


def _draw(draw: Callable[[Any], None], height_in: float) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a display
    except ModuleNotFoundError as error:
        raise InputError(
            "the HTML report needs matplotlib",
            remedy=f"{explain_extra('report')}; `--csv` and `--json` work without it",
        ) from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure.add_subplot())
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(text.getvalue()).decode()}"


def render_page(runs: Sequence[RunResults]) -> str:
    """Return the page of one run, or of several side by side. Raises InputError if matplotlib is missing."""
    title = "Run " + runs[0].summary.run_id if len(runs) == 1 else f"{len(runs)} runs"
    names = [f"{run.summary.run_id}: " if len(runs) > 1 else "" for run in runs]
    metrics = dict.fromkeys(
        name.removeprefix("val_") for run in runs for point in run.series.epochs for name in point.results
    )
    by_epoch = [_epoch_chart(runs, name) for name in metrics]
    learnt = _section("Learning and throughput", *by_epoch, _speed_chart(runs))
    sections = [
        _section("Results", tables.compare(runs, [tables.describe_run(run.summary) for run in runs])),
        *([learnt] if len(runs) > 1 else []),
    ]
    for name, run in zip(names, runs, strict=True):
        energy = tuple(run.summary.energy.describe()) if run.summary.energy else ()
        sections += [
            _section(f"{name}Ranks", tables.tabulate_ranks(run.summary)),
            *([learnt] if len(runs) == 1 else []),
            _section(f"{name}Time", _lanes_chart(run)),
            _section(f"{name}Faults and downtime", tables.tabulate_faults(run)),
            _section(f"{name}Energy", DataTable(("machine", "energy"), energy)),
        ]
    settings = tables.compare(runs, [tables.describe_settings(run) for run in runs])
    sections.append(_section("Job", settings))
    headlines = [_headline(run, run.summary.run_id if len(runs) > 1 else "") for run in runs]
    lines = "".join(f".k{number}{{--k:{color}}}" for number, color in enumerate(SERIES))
    style = COLORS + lines + Path(__file__).with_suffix(".css").read_text()
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_text(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{style}</style></head><body>",
        f'<a class="skip" href="#content">Skip to the charts</a><header><h1>{_text(title)}</h1>',
        *headlines,
        '</header><main id="content">',
        *sections,
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _headline(run: RunResults, run_id: str) -> str:
    started = datetime.fromtimestamp(run.series.start_s, UTC)
    named = ", ".join(filter(None, [run_id, str(run.manifest.job.get("model", ""))]))
    badge = " <strong class=badge>emulated fleet: not the speed of real devices</strong>"
    lines = "".join(f"<dt>{name}<dd>{_text(text)}" for name, text in write_headline(run).items())
    return (
        f"<p>{_text(named)}{', ' if named else ''}started {started:%Y-%m-%d %H:%M:%S} UTC"
        f"{badge if run.summary.emulated else ''}</p><dl>{lines}</dl>"
    )


def _section(title: str, *parts: Chart | DataTable) -> str:
    content = "".join(_figure(part) if isinstance(part, Chart) else _table(part, title) for part in parts)
    return f"<section><h2>{_text(title)}</h2><div class=parts>{content}</div></section>" if content else ""


def _figure(chart: Chart) -> str:
    names = "".join(
        f'<li class="k{number % len(SERIES)} d{number // len(SERIES) % len(DASHES)}">{_text(name)}</li>'
        for number, name in enumerate(chart.legend if len(chart.legend) > 1 else ())
    )
    return (
        f"<figure><figcaption><h3>{_text(chart.title)}</h3><p>{_text(chart.text)}</p></figcaption>"
        f"{f'<ul>{names}</ul>' if names else ''}"
        f'<img alt="{_text(f"{chart.title}. {chart.text}")}" src="{chart.draw()}">'
        f"<details><summary>Chart data</summary>{_table(chart.data, chart.title)}</details></figure>"
    )


def _table(table: DataTable, title: str) -> str:
    """Return a table that scrolls where it is too wide, also by keyboard. Numbers are right-aligned."""
    if not table.rows:
        return ""
    numeric = [all(NUMERIC.fullmatch(cell) for cell in cells) for cells in zip(*table.rows, strict=True)]
    header = "".join(
        f'<th scope="col"{CLASSES[is_number]}>{_text(cell)}</th>'
        for cell, is_number in zip(table.header, numeric, strict=False)
    )
    rows = ""
    for name, *values in table.rows:
        cells = (
            f"<td{CLASSES[is_number]}>{_text(cell)}</td>"
            for cell, is_number in zip(values, numeric[1:], strict=True)
        )
        rows += f'<tr><th scope="row"{CLASSES[numeric[0]]}>{_text(name)}</th>{"".join(cells)}</tr>'
    head = f"<thead><tr>{header}</tr></thead>" if header else ""
    return (
        f'<div class=scroll role="region" tabindex="0" aria-label="{_text(title)}"><table>'
        f"{head}<tbody>{rows}</tbody></table></div>"
    )


def _text(text: object) -> str:
    return html.escape(make_printable(shorten(str(text), MAX_CELL_CHARS)))
