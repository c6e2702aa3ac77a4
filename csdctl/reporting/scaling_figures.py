"""A scaling series as charts and tables, as figures 6 and 7 and Table II of the STANNIS paper."""

from typing import Any

from csdctl.reporting.charts import Chart, DataTable
from csdctl.reporting.drawing import draw_lines
from csdctl.reporting.numbers import format_rate, format_share
from csdctl.reporting.scaling import ScalingPoint, ScalingSeries
from csdctl.runs.ledger import MEASURED


def describe_series(series: ScalingSeries) -> str:
    """Return what the series is, in a sentence."""
    host = f"; the host alone: {format_rate(series.host_samples_per_s)} samples/s, by {series.host_source}"
    kind = f"; {series.kind}" if series.kind else ""
    return f"{len(series.points)} runs, {series.origin}{kind}{host if series.host_samples_per_s else ''}"


def scaling_charts(series: ScalingSeries) -> list[Chart]:
    """Return the charts of what is known: speed-up, efficiency, energy per image."""
    energy = [point.energy.joules_per_sample if point.energy else None for point in series.points]
    found = (
        ("Speed-up over the host alone", "times the host alone", series.speedups),
        ("Efficiency", "share of the ranks alone", series.by_nodes([p.efficiency for p in series.points])),
        ("Energy per image", "J", series.by_nodes(energy)),
    )
    charts = [_chart(series, title, unit, values) for title, unit, values in found if values]
    return charts


def _chart(series: ScalingSeries, title: str, unit: str, by_nodes: dict[int, float]) -> Chart:
    last = max(by_nodes)
    nodes, values = [float(number) for number in by_nodes], list(by_nodes.values())
    rows = [(str(number), f"{value:.4g}") for number, value in by_nodes.items()]
    return Chart(
        title,
        f"{by_nodes[last]:.3g} ({unit}) with {last} nodes; the median where several runs have as many.",
        series.origin,
        lambda: draw_lines({title: (nodes, values)}, "nodes", unit, from_zero=True),
        DataTable(("nodes", unit), tuple(rows)),
    )


def scaling_table(series: ScalingSeries) -> DataTable:
    """Return a row for each run."""
    rows = [
        (
            str(point.num_nodes),
            point.run_id,
            f"{point.global_batch:,}",
            format_rate(point.samples_per_s),
            "–" if point.speedup is None else f"{point.speedup:.2f}",
            format_share(point.efficiency),
            _remark(point),
        )
        for point in series.points
    ]
    header = ("nodes", "run", "global batch", "samples/s", "speed-up", "efficiency", "remark")
    return DataTable(header, tuple(rows))


def energy_by_nodes(series: ScalingSeries) -> DataTable:
    """Return energy per image by the number of nodes, and what is saved against none: Table II."""
    without = series.by_nodes(
        [p.energy.joules_per_sample if p.energy and not p.num_nodes else None for p in series.points]
    ).get(0)
    rows = []
    for point in series.points:
        energy = point.energy
        each = energy.joules_per_sample if energy else None
        if energy is None or each is None:
            rows.append((str(point.num_nodes), point.run_id, *["–"] * 5, "not known"))
            continue
        rows.append(
            (
                str(point.num_nodes),
                point.run_id,
                f"{each:.4g}",
                "–" if not without else format_share(1 - each / without),
                f"{1 / each:.4g}",
                f"{energy.mean_watts:.1f} W" if energy.mean_watts else "–",
                _above_idle(energy.above_idle_joules, energy.samples),
                series.origin if energy.origin == MEASURED else energy.origin,
            )
        )
    header = ("nodes", "run", "J/image", "saved", "images/J", "power", "J/image above idle")
    return DataTable((*header, "source"), tuple(rows))


def scaling_document(series: ScalingSeries) -> dict[str, Any]:
    """Return the `csdctl.scaling/1` document."""
    points = []
    for point in series.points:
        content = {key: value for key, value in vars(point).items() if key != "energy"}
        energy = point.energy
        content["joules_per_sample"] = energy.joules_per_sample if energy else None
        content["samples_per_joule"] = energy.samples_per_joule if energy else None
        content["energy_origin"] = energy.origin if energy else None
        points.append(content)
    return {
        "schema": "csdctl.scaling/1",
        "origin": series.origin,
        "kind": series.kind,
        "host_samples_per_s": series.host_samples_per_s,
        "host_source": series.host_source,
        "points": points,
    }


def _above_idle(joules: float | None, samples: int) -> str:
    return "–" if joules is None or not samples else f"{joules / samples:.4g}"


def _remark(point: ScalingPoint) -> str:
    parts = [] if point.is_host_training else ["the host does not train"]
    if point.lost:
        parts.append(f"lost on the way: {', '.join(point.lost)}")
    return "; ".join(parts)
