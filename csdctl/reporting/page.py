"""A report as one HTML file, which loads nothing and has no script.

All text is escaped: names, errors and versions come from nodes and jobs. Should that
fail, the page's content security policy still refuses scripts and requests.
"""

import html
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from csdctl.fleet.names import format_node_names
from csdctl.reporting.charts import (
    Chart,
    DataTable,
    epoch_charts,
    lanes_chart,
    sizes_chart,
    speed_chart,
)
from csdctl.reporting.energy import MachineEnergy
from csdctl.reporting.numbers import (
    format_accuracy,
    format_bytes,
    format_loss,
    format_rate,
    format_seconds,
    format_share,
)
from csdctl.reporting.results import PREDICTED, STATED, RunResults, RunSummary
from csdctl.reporting.scaling import (
    ScalingSeries,
    describe_series,
    energy_by_nodes,
    scaling_charts,
    scaling_table,
)
from csdctl.reporting.series import find_bottleneck
from csdctl.runs.ledger import MEASURED

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
    charts = [lanes_chart(run), sizes_chart(run)]
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


def _speed_up(summary: RunSummary) -> str:
    host = summary.ranks[0].alone_samples_per_s if summary.ranks else None
    return f"{summary.step_samples_per_s / host:.2f}" if host else "–"


Figure = tuple[str, str | None, Callable[[RunSummary], str]]
"""A name, where the number is from (None: measured), and the number as text."""
FIGURES: tuple[Figure, ...] = (
    ("ended", None, lambda s: s.state),
    ("ranks", STATED, lambda s: str(s.num_ranks)),
    ("strategy", STATED, lambda s: f"{s.strategy}{f' at {s.cut}' if s.cut else ''}"),
    ("batch sizes by", STATED, lambda s: s.method),
    ("global batch size at the start", STATED, lambda s: f"{s.global_batch:,}"),
    ("epochs", None, lambda s: str(s.epochs)),
    ("steps", None, lambda s: f"{s.steps:,}"),
    ("samples", None, lambda s: f"{s.samples:,}"),
    ("training time", None, lambda s: format_seconds(s.training_s)),
    ("samples/s, whole epochs", None, lambda s: format_rate(s.samples_per_s)),
    ("samples/s, steps alone", None, lambda s: format_rate(s.step_samples_per_s)),
    ("samples/s by the plan", PREDICTED, lambda s: format_rate(s.predicted_samples_per_s)),
    ("samples/s of the ranks alone, added", None, lambda s: format_rate(s.alone_samples_per_s)),
    ("efficiency", None, lambda s: format_share(s.efficiency)),
    ("speed-up over the host alone", None, _speed_up),
    ("training loss", None, lambda s: format_loss(s.loss)),
    ("validation loss", None, lambda s: format_loss(s.validation_loss)),
    ("training accuracy", None, lambda s: format_accuracy(s.accuracy)),
    ("validation accuracy", None, lambda s: format_accuracy(s.validation_accuracy)),
    ("weights identical on all ranks", None, lambda s: "yes" if s.identical_weights else "not compared"),
    ("nodes lost", None, lambda s: format_node_names(s.lost_nodes) or "none"),
    ("batch sizes changed", None, lambda s: f"{s.num_rebalanced} times"),
    ("events that could not be read", None, lambda s: str(s.num_unreadable)),
)


def comparison(runs: Sequence[RunResults]) -> DataTable:
    """Return all numbers of the runs, side by side."""
    rows = []
    for name, origin, read in FIGURES:
        found = origin or ", ".join(sorted({run.measured for run in runs}))
        rows.append((name, *(read(run.summary) for run in runs), found))
    return DataTable(("", *(run.summary.run_id for run in runs), "source"), tuple(rows))


def faults(run: RunResults) -> DataTable:
    """Return what failed, when, and what that cost."""
    series = run.series
    rows = [
        (
            f"{fault.time_s - series.start_s:.0f} s",
            fault.node,
            fault.what,
            "–" if fault.stopped_s is None else f"all ranks stopped for {format_seconds(fault.stopped_s)}",
        )
        for fault in series.faults
    ]
    if series.num_more_faults:
        rows.append(("", "", f"and {series.num_more_faults:,} more", ""))
    return DataTable(("after", "node", "what", f"cost ({run.measured})"), tuple(rows))


def held_back(run: RunResults) -> DataTable:
    """Return the rank that held the others back, since when and why; no row if none did."""
    facts = _facts(run)
    shares = {}
    for rank, peak in run.series.peak_memory_bytes.items():
        known = facts.get(run.series.nodes[rank], {})
        sizes = [known.get("memory_limit_bytes"), known.get("memory_bytes")]
        limits = [size for size in sizes if isinstance(size, int | float) and size > 0]
        if limits:
            shares[rank] = peak / min(limits)
    bottleneck = find_bottleneck(run.series, memory_shares=shares)
    if bottleneck is None:
        return DataTable((), ())
    row = (f"{bottleneck.since_s:.0f} s", bottleneck.cause, bottleneck.text)
    return DataTable(("since", "cause", f"what shows it ({run.measured})"), (row,))


def _facts(run: RunResults) -> dict[str, Mapping[str, Any]]:
    """Return what the manifest has about each machine."""
    fleet = run.manifest.get("fleet")
    facts = fleet.get("facts") if isinstance(fleet, Mapping) else None
    found = facts if isinstance(facts, Mapping) else {}
    return {node: known for node, known in found.items() if isinstance(known, Mapping)}


def coverage(run: RunResults) -> DataTable:
    """Return how much private data each node has, and how much of all of it was read."""
    summary = run.summary
    rows = [
        (f"{rank.rank} {rank.node}", f"{rank.num_private:,}", f"{rank.num_public:,}")
        for rank in summary.ranks
    ]
    private = sum(rank.num_private for rank in summary.ranks)
    due = private * summary.epochs
    if due:
        read = 1 - min(summary.num_private_unread / due, 1.0)
        text = f"{format_share(read)} read; {summary.num_private_unread:,} unread, as their node was absent"
        rows.append(("all epochs", f"{due:,}: {text}", ""))
    return DataTable(("rank", "private samples per epoch", "public samples per epoch"), tuple(rows))


FACTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("processor", "cpu_model", str),
    ("architecture", "architecture", str),
    ("cores", "num_cores", str),
    ("CPU limit", "cpu_limit", str),
    ("memory", "memory_bytes", format_bytes),
    ("memory limit", "memory_limit_bytes", format_bytes),
    ("Python", "python_version", str),
    ("TensorFlow", "tensorflow_version", str),
    ("Keras", "keras_version", str),
    ("MPI", "mpi_version", str),
)


def machines(run: RunResults) -> DataTable:
    """Return the hardware and software of each machine, as found by `discover`, and the memory it used."""
    facts, rows = _facts(run), []
    for rank, node in enumerate(run.series.nodes):
        known = facts.get(node, {})
        cells = [_fact(known.get(key), show) for _, key, show in FACTS]
        rows.append((node, *cells, format_bytes(run.series.peak_memory_bytes.get(rank))))
    versions = run.manifest.get("versions")
    version = run.manifest.get("csdctl", "–")
    others = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, Mapping) else ""
    rows.append(("controller", f"csdctl {version}, {others}", *[""] * len(FACTS)))
    return DataTable(("machine", *(name for name, _, _ in FACTS), "peak memory of the rank"), tuple(rows))


def _fact(value: Any, show: Callable[[Any], str]) -> str:
    """Return a fact as text, whatever a manifest that was edited has there."""
    try:
        return "–" if value is None else show(value)
    except (TypeError, ValueError):
        return str(value)


ENERGY_COLUMNS = (
    "machine",
    "energy while training",
    "above idle",
    "mean power",
    "J per image",
    "images per J",
    "known for",
    "by",
    "source",
    "CPU time of the rank",
)


def energy_table(run: RunResults) -> DataTable:
    """Return the energy of each machine and of all; CPU time always, since every rank reports it."""
    energy = run.summary.energy
    found = {machine.machine: machine for machine in energy.machines} if energy else {}
    rows = []
    for rank, node in enumerate(run.series.nodes):
        cpu_s = run.series.cpu_s.get(rank)
        cpu = "–" if cpu_s is None else format_seconds(cpu_s)
        cells = (
            _energy_cells(found[node], run.measured)
            if node in found
            else ("–",) * 6 + ("not configured", "–")
        )
        rows.append((node, *cells, cpu))
    if energy and energy.whole:
        cells = _energy_cells(energy.whole, run.measured)
        rows.append(("all", *cells, format_seconds(sum(run.series.cpu_s.values()))))
    elif energy:
        rows.append(("all", "–", *[""] * 5, f"not known of {format_node_names(energy.missing)}", "", ""))
    return DataTable(ENERGY_COLUMNS, tuple(rows))


def _energy_cells(machine: MachineEnergy, measured: str) -> tuple[str, ...]:
    """Return what ENERGY_COLUMNS names, but for the machine and CPU time."""
    return (
        f"{machine.joules:,.1f} J" if machine.seconds else "–",
        "not stated" if machine.idle_watts is None else f"{machine.above_idle_joules:,.1f} J",
        _quantity(machine.mean_watts, "{:.2f} W"),
        _quantity(machine.joules_per_sample, "{:.3g}"),
        _quantity(machine.samples_per_joule, "{:.3g}"),
        format_share(machine.coverage),
        machine.source if not machine.error else f"{machine.source}: {machine.error}",
        measured if machine.origin == MEASURED else machine.origin,
    )


def _quantity(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


STYLE = """
:root{color-scheme:light dark;
--paper:#fff;--ink:#1d2733;--soft:#5a6775;--grid:#d5dbe1;--panel:#f6f8fa;
--series-0:#0b63b5;--series-1:#c2570c;
--series-2:#d9a400;--series-3:#7a3ea1;
--series-4:#8a96a3;
--series-5:#0f8a6a;
--series-6:#c0246a;--series-7:#5c4b37}
@media (prefers-color-scheme:dark){:root{
--paper:#12171d;--ink:#e6ebf0;--soft:#a3afbb;--grid:#3a4551;--panel:#1a2129;
--series-0:#5aa9f0;--series-1:#f08a4b;
--series-2:#f2cc5c;--series-3:#b98be0;
--series-4:#7d8894;
--series-5:#45c9a2;
--series-6:#f06fa8;--series-7:#c2a98a}}
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
svg{display:block;width:100%;height:auto;max-width:46rem;font-family:inherit}
.scroll{overflow:auto;max-width:100%}details .scroll{max-height:28rem}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid);
overflow-wrap:normal}
td{max-width:32rem;overflow-wrap:break-word}thead th{color:var(--soft);font-weight:600}
tbody th{font-weight:500}
summary{cursor:pointer;font-size:.87rem;color:var(--soft)}
:focus-visible{outline:2px solid var(--series-0);outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{position:static}
@media print{body{max-width:none;padding:0;font-size:10pt}figure,tr{break-inside:avoid}
.scroll{max-height:none;overflow:visible}.skip{display:none}
:root{--paper:#fff;--ink:#000;--soft:#333;--grid:#bbb;--panel:#fff}}
"""
