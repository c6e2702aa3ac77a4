"""A report as one HTML file, which loads nothing and has no script.

All text is escaped: names, errors and versions come from nodes and jobs. Should that
fail, the page's content security policy still refuses scripts and requests.
"""

import html
import itertools
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from csdctl.reporting.charts import (
    Chart,
    DataTable,
    bytes_chart,
    epoch_charts,
    lanes_chart,
    sizes_chart,
    speed_chart,
    speedup_chart,
)
from csdctl.reporting.energy_figures import energy_table
from csdctl.reporting.figures import comparison, coverage, faults, held_back, machines
from csdctl.reporting.page_style import STYLE
from csdctl.reporting.results import RunResults
from csdctl.reporting.scaling import ScalingSeries
from csdctl.reporting.scaling_figures import (
    describe_series,
    energy_by_nodes,
    scaling_charts,
    scaling_table,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MAX_CELL_CHARS = 500


def render_page(runs: Sequence[RunResults]) -> str:
    """Return the page of one run, or of several side by side; raises InputError without matplotlib."""
    title = "Run " + runs[0].summary.run_id if len(runs) == 1 else f"{len(runs)} runs"
    numbers = itertools.count(1)
    charts = (*epoch_charts(runs), speed_chart(runs))
    sections = [
        _section("Numbers", [_table(comparison(runs), "Numbers")]),
        _section("Learning and speed", [_figure(chart, numbers) for chart in charts]),
        *(_run_part(run, numbers, is_only=len(runs) == 1) for run in runs),
    ]
    return _document(title, [_headline(run) for run in runs], sections)


def render_scaling_page(series: ScalingSeries) -> str:
    """Return the page of runs with different numbers of nodes; raises InputError without matplotlib."""
    numbers = itertools.count(1)
    sections = [
        _section("Speed-up and efficiency", [_figure(c, numbers) for c in scaling_charts(series)]),
        _section("Numbers", [_table(scaling_table(series), "Numbers")]),
        _section("Energy per image", [_table(energy_by_nodes(series), "Energy per image")]),
    ]
    return _document("Scaling", [describe_series(series)], sections)


def _document(title: str, lines: Sequence[str], sections: Sequence[str]) -> str:
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_text(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f'<a class="skip" href="#content">Skip to the charts</a><header><h1>{_text(title)}</h1>',
        *(f"<p>{_text(line)}</p>" for line in lines),
        '</header><main id="content">',
        *sections,
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _run_part(run: RunResults, numbers: Iterator[int], *, is_only: bool) -> str:
    """Return what is shown of each run by itself."""
    charts = [lanes_chart(run), sizes_chart(run), speedup_chart(run), bytes_chart(run)]
    name = "" if is_only else f"{run.summary.run_id}: "
    return "\n".join(
        [
            _section(f"{name}Ranks and links", [_figure(chart, numbers) for chart in charts if chart]),
            _section(f"{name}What held the ranks back", [_table(held_back(run), "What held the ranks back")]),
            _section(f"{name}Faults and what they cost", [_table(faults(run), "Faults")]),
            _section(f"{name}Energy", [_table(energy_table(run), "Energy")]),
            _section(f"{name}Private data", [_table(coverage(run), "Coverage of private data")]),
            _section(f"{name}Software and hardware", [_table(machines(run), "Machines")]),
        ]
    )


def _headline(run: RunResults) -> str:
    """Return when and where a run was, and how it ended."""
    started = datetime.fromtimestamp(run.series.start_s, UTC)
    job: Any = run.manifest.get("job") or {}
    model = job.get("model", "") if isinstance(job, dict) else ""
    emulated = " on an emulated fleet" if run.is_emulated else ""
    state = f"{run.summary.run_id}: {run.summary.state}{emulated}"
    return f"{state}, started {started:%Y-%m-%d %H:%M:%S} UTC; {model}"


def _section(title: str, parts: Sequence[str]) -> str:
    return f"<section><h2>{_text(title)}</h2><div class=parts>{''.join(parts)}</div></section>"


def _figure(chart: Chart, numbers: Iterator[int]) -> str:
    """Return a chart with its caption, and its data to unfold."""
    number = next(numbers)
    svg = re.sub(r'((?:id=|href=|url\()"?#?)(?=[mp][0-9a-f]{10})', rf"\1c{number}-", chart.draw())
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{_text(f"{chart.title}. {chart.text}")}"', 1)
    return (
        f'<figure id="chart-{number}"><figcaption><h3>{_text(chart.title)}</h3><p>{_text(chart.text)} '
        f"<em>{_text(chart.origin)}</em></p></figcaption>{svg}"
        f"<details><summary>Data of this chart</summary>{_table(chart.data, chart.title)}</details></figure>"
    )


def _table(table: DataTable, name: str) -> str:
    """Return a table that scrolls by keyboard where it is too wide."""
    if not table.rows:
        return "<p>None.</p>"
    header = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.header)
    rows = "".join(map(_row, table.rows))
    return (
        f'<div class=scroll role="region" tabindex="0" aria-label="{_text(name)}"><table>'
        f"<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(row: Sequence[str]) -> str:
    cells = "".join(f"<td>{_text(cell)}</td>" for cell in row[1:])
    return f'<tr><th scope="row">{_text(row[0])}</th>{cells}</tr>'


def _text(text: object) -> str:
    """Return text as HTML has it, in a tag and in an attribute; control characters are left out."""
    shown = str(text)
    if len(shown) > MAX_CELL_CHARS:
        shown = shown[: MAX_CELL_CHARS - 1] + "…"
    return html.escape("".join(char for char in shown if char.isprintable()))
