"""Charts as SVG, by matplotlib: no script, no request, text stays text.

Colours are variables of the page (`var(--series-0)`), so that one drawing serves light, dark and print.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from csdctl.errors import InputError

WIDTH_IN, HEIGHT_IN, LANE_IN = 5.2, 3.0, 0.2
LEGEND_CHARS, LABEL_CHARS = 80, 24
INK, GRID = "#010301", "#010302"
SERIES = tuple(f"#0104{number:02x}" for number in range(8))
"""Placeholders: matplotlib writes them as they are, and `_finish` replaces them by variables."""
STYLE: dict[str, Any] = {
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
}
DASHES = ("-", "--", ":", "-.")
MISSING = "the HTML report needs matplotlib"
REMEDY = "pip install 'csdctl[report]'; `--csv` and `--json` need nothing"
Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""x and y by name."""


def draw_lines(lines: Lines, x_label: str, y_label: str, *, from_zero: bool = False) -> str:
    """Draw a line for each name; a series of one point is drawn as a point."""

    def draw(axes: Any) -> None:
        for number, (name, (x, y)) in enumerate(lines.items()):
            # Colours repeat after 8 lines, and come back dashed; short lines show their points.
            style = DASHES[number // len(SERIES) % len(DASHES)]
            color = SERIES[number % len(SERIES)]
            marker = "o" if len(x) <= 30 else None
            axes.plot(x, y, style, color=color, label=_short(name), marker=marker, markersize=3)
        axes.set(xlabel=x_label, ylabel=_short(y_label))
        if all(float(value).is_integer() for x, _ in lines.values() for value in x):
            axes.locator_params(axis="x", integer=True)  # no half epochs, no half nodes
        if from_zero:
            axes.set_ylim(0, 1.08 * max((max(y) for _, y in lines.values() if y), default=0) or 1)
        _legend(axes, len(lines))

    return _drawn(draw, HEIGHT_IN)


def draw_steps(lines: Lines, x_label: str, y_label: str) -> str:
    """Draw values that hold until the next, one line for each name."""

    def draw(axes: Any) -> None:
        for number, (name, (x, y)) in enumerate(lines.items()):
            style = DASHES[number // len(SERIES) % len(DASHES)]
            color = SERIES[number % len(SERIES)]
            axes.step(x, y, style, where="post", color=color, label=_short(name))
        axes.set(xlabel=x_label, ylabel=_short(y_label))
        axes.set_ylim(bottom=0)
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


def draw_bars(bars: Mapping[str, float], x_label: str) -> str:
    """Draw a horizontal bar for each name."""

    def draw(axes: Any) -> None:
        names = list(bars)[::-1]
        axes.barh(range(len(names)), [bars[name] for name in names], color=SERIES[0], height=0.6)
        axes.set_yticks(range(len(names)), [*map(_short, names)])
        axes.set(xlabel=x_label)
        axes.grid(visible=False, axis="y")

    return _drawn(draw, 1.0 + 0.3 * len(bars))


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
    settings: Any = {**STYLE, "svg.hashsalt": "csdctl"}  # the same ids in every report
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _finish(text.getvalue())


def _finish(svg: str) -> str:
    """Return the drawing as part of a page: without prologue and metadata, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every drawing; ids of a page are unique
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(
        r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL
    )  # it would hold for the page
    svg = re.sub(r" font-family: [^;]*;", "", svg)
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return re.sub(r"#0104([0-9a-f]{2})", lambda found: f"var(--series-{int(found[1], 16)})", svg)
