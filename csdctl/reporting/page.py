"""A report as one self-contained HTML file without scripts.

All text is escaped: names, errors and versions come from nodes and jobs. Should that
fail, the page's content security policy still refuses scripts and requests.
"""

import html
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from csdctl.notify import make_printable, shorten
from csdctl.reporting import charts, tables
from csdctl.reporting.charts import Chart
from csdctl.reporting.results import RunResults
from csdctl.reporting.tables import DataTable, write_headline

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MAX_CELL_CHARS = 500
"""Longer texts are cut."""
NUMERIC = re.compile(r"–|[\d,.:]+( ?(%|s|ms|W|[KMGT]?i?B))?( \(\d+%\))?")
"""A cell that is a number with its unit, or unknown."""
CLASSES = ("", " class=n")
"""Attribute of a cell: of a text, and of a number."""
COLORS = f":root{{--ink:{charts.INK};--grid:{charts.GRID};--soft:#5a6775;--panel:#f6f8fa;--accent:#0b63b5}}"
"""Colours that the stylesheet, page.css, names."""


def render_page(runs: Sequence[RunResults]) -> str:
    """Return the page of one run, or of several side by side. Raises InputError without matplotlib."""
    title = "Run " + runs[0].summary.run_id if len(runs) == 1 else f"{len(runs)} runs"
    names = [f"{run.summary.run_id}: " if len(runs) > 1 else "" for run in runs]
    learnt = _section("Learning and throughput", *charts.epoch_charts(runs), charts.speed_chart(runs))
    sections = [
        _section("Results", tables.compare(runs, [tables.describe_run(run.summary) for run in runs])),
        *([learnt] if len(runs) > 1 else []),
    ]
    for name, run in zip(names, runs, strict=True):
        sections += [
            _section(f"{name}Ranks", tables.tabulate_ranks(run.summary)),
            *([learnt] if len(runs) == 1 else []),
            _section(f"{name}Time", charts.lanes_chart(run)),
            _section(f"{name}Faults and downtime", tables.tabulate_faults(run)),
            _section(f"{name}Energy", tables.tabulate_energy(run)),
        ]
    settings = tables.compare(runs, [tables.describe_settings(run) for run in runs])
    sections.append(_section("Job", settings))
    headlines = [_headline(run, run.summary.run_id if len(runs) > 1 else "") for run in runs]
    lines = "".join(f".k{number}{{--k:{color}}}" for number, color in enumerate(charts.SERIES))
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


def _headline(run: RunResults, name: str) -> str:
    """Return the headline of a run. `name` is its id among several."""
    started = datetime.fromtimestamp(run.series.start_s, UTC)
    named = ", ".join(filter(None, [name, str(run.manifest.job.get("model", ""))]))
    badge = " <strong class=badge>emulated fleet: not the speed of real devices</strong>"
    lines = "".join(f"<dt>{name}<dd>{_text(text)}" for name, text in write_headline(run).items())
    return (
        f"<p>{_text(named)}{', ' if named else ''}started {started:%Y-%m-%d %H:%M:%S} UTC"
        f"{badge if run.summary.emulated else ''}</p><dl>{lines}</dl>"
    )


def _section(title: str, *parts: Chart | DataTable) -> str:
    """Return a section. Nothing without a chart or a row."""
    content = "".join(_figure(part) if isinstance(part, Chart) else _table(part, title) for part in parts)
    return f"<section><h2>{_text(title)}</h2><div class=parts>{content}</div></section>" if content else ""


def _figure(chart: Chart) -> str:
    """Return a chart with its caption and legend, and its data to unfold."""
    names = "".join(
        f'<li class="k{number % len(charts.SERIES)} d{number // len(charts.SERIES)}">{_text(name)}</li>'
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
        rows += f'<tr><th scope="row">{_text(name)}</th>{"".join(cells)}</tr>'
    head = f"<thead><tr>{header}</tr></thead>" if header else ""
    return (
        f'<div class=scroll role="region" tabindex="0" aria-label="{_text(title)}"><table>'
        f"{head}<tbody>{rows}</tbody></table></div>"
    )


def _text(text: object) -> str:
    """Return text as HTML has it, in a tag and in an attribute."""
    return html.escape(make_printable(shorten(str(text), MAX_CELL_CHARS)))
