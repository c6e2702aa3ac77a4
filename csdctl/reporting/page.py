"""A report as one HTML file, which loads nothing and has no script.

All text is escaped: names, errors and versions come from nodes and jobs. Should that
fail, the page's content security policy still refuses scripts and requests.
"""

import html
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from csdctl.reporting import charts, scaling, tables
from csdctl.reporting.charts import Chart
from csdctl.reporting.results import RunResults
from csdctl.reporting.scaling import ScalingSeries
from csdctl.reporting.tables import DataTable

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MAX_CELL_CHARS = 500


def render_page(runs: Sequence[RunResults]) -> str:
    """Return the page of one run, or of several side by side; raises InputError without matplotlib."""
    title = "Run " + runs[0].summary.run_id if len(runs) == 1 else f"{len(runs)} runs"
    sections = [
        _section("Numbers", tables.compare_results(runs)),
        _section("Learning and speed", *charts.epoch_charts(runs), charts.speed_chart(runs)),
    ]
    for run in runs:
        name = f"{run.summary.run_id}: " if len(runs) > 1 else ""
        sizes = [charts.sizes_chart(run)] if run.series.batch_sizes else []
        sections += [
            _section(
                f"{name}Ranks and links", tables.tabulate_ranks(run.summary), charts.lanes_chart(run), *sizes
            ),
            _section(f"{name}What held the ranks back", tables.tabulate_bottleneck(run)),
            _section(f"{name}Faults and what they cost", tables.tabulate_faults(run)),
            _section(f"{name}Energy while training", tables.tabulate_energy(run)),
            _section(f"{name}Software and hardware", tables.tabulate_machines(run)),
        ]
    return _document(title, [_headline(run) for run in runs], sections)


def render_scaling_page(series: ScalingSeries) -> str:
    """Return the page of runs with different numbers of nodes; raises InputError without matplotlib."""
    sections = [
        _section("Speed-up and efficiency", *scaling.scaling_charts(series)),
        _section("Numbers", scaling.scaling_table(series)),
        _section("Energy per image", scaling.energy_by_nodes(series)),
    ]
    return _document("Scaling", [scaling.describe_series(series)], sections)


def _document(title: str, lines: Sequence[str], sections: Sequence[str]) -> str:
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_text(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f'<a class="skip" href="#content">Skip to the charts</a><header><h1>{_text(title)}</h1>',
        *(f"<p>{_text(line)}</p>" for line in lines),
        '</header><main id="content">',
        *sections,
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _headline(run: RunResults) -> str:
    """Return when and where a run was, and how it ended."""
    started = datetime.fromtimestamp(run.series.start_s, UTC)
    job: Any = run.manifest.get("job") or {}
    model = job.get("model", "") if isinstance(job, dict) else ""
    emulated = " on an emulated fleet" if run.is_emulated else ""
    state = f"{run.summary.run_id}: {run.summary.state}{emulated}"
    return f"{state}, started {started:%Y-%m-%d %H:%M:%S} UTC; {model}"


def _section(title: str, *parts: Chart | DataTable) -> str:
    shown = "".join(_figure(part) if isinstance(part, Chart) else _table(part, title) for part in parts)
    return f"<section><h2>{_text(title)}</h2><div class=parts>{shown}</div></section>"


def _figure(chart: Chart) -> str:
    """Return a chart with its caption, and its data to unfold."""
    return (
        f"<figure><figcaption><h3>{_text(chart.title)}</h3><p>{_text(chart.text)} "
        f"<em>{_text(chart.origin)}</em></p></figcaption>"
        f'<img alt="{_text(f"{chart.title}. {chart.text}")}" src="{chart.draw()}">'
        f"<details><summary>Data of this chart</summary>{_table(chart.data, chart.title)}</details></figure>"
    )


def _table(table: DataTable, title: str) -> str:
    """Return a table that scrolls by keyboard where it is too wide."""
    if not table.rows:
        return "<p>None.</p>"
    header = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.header)
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in table.rows
    )
    return (
        f'<div class=scroll role="region" tabindex="0" aria-label="{_text(title)}"><table>'
        f"<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _text(text: object) -> str:
    """Return text as HTML has it, in a tag and in an attribute; control characters are left out."""
    shown = str(text)
    if len(shown) > MAX_CELL_CHARS:
        shown = shown[: MAX_CELL_CHARS - 1] + "…"
    return html.escape("".join(char for char in shown if char.isprintable()))


STYLE = """
:root{--paper:#fff;--ink:#1d2733;--soft:#5a6775;--grid:#d5dbe1;--panel:#f6f8fa}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:82rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Roboto,"Liberation Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:0 0 .3rem}
h2{font-size:1.2rem;margin:2rem 0 .6rem;border-bottom:1px solid var(--grid)}
h3{font-size:1rem;margin:0}header p,figcaption p{margin:.1rem 0 .5rem;color:var(--soft)}
figcaption p{font-size:.87rem}
.parts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem;align-items:start}
.parts>.scroll,.parts>p{grid-column:1/-1}
figure{margin:0;padding:.9rem;background:var(--panel);border-radius:6px;min-width:0}
img{display:block;width:100%;height:auto;max-width:46rem}
.scroll{overflow:auto;max-width:100%}details .scroll{max-height:28rem}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid);
overflow-wrap:normal}
td{max-width:32rem;overflow-wrap:break-word}thead th{color:var(--soft);font-weight:600}
tbody th{font-weight:500}
summary{cursor:pointer;font-size:.87rem;color:var(--soft)}
:focus-visible{outline:2px solid #0b63b5;outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{position:static}
@media print{body{max-width:none;padding:0;font-size:10pt}figure,tr{break-inside:avoid}
.scroll{max-height:none;overflow:visible}.skip{display:none}}
"""
