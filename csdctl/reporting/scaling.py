"""Runs of one model with 0, 1, 2 … nodes: speed-up, efficiency and energy per image; pure.

Speed-up is the rate of the steps over that of the host alone, as in figure 6 of the STANNIS paper; efficiency
is that rate over the sum of what the ranks reach alone, so that 100% loses nothing to waiting and
communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.names import format_node_names
from csdctl.reporting.charts import Chart, draw_lines
from csdctl.reporting.energy import MachineEnergy
from csdctl.reporting.numbers import format_rate, format_share
from csdctl.reporting.results import RunResults
from csdctl.reporting.tables import DataTable

KINDS = {
    "weak": "weak scaling: the global batch grows with the ranks",
    "strong": "strong scaling: the global batch stays",
}
TUNED = "the host's rate in tuning"


@dataclass(frozen=True)
class ScalingPoint:
    """One run."""

    run_id: str
    num_nodes: int
    """Number of nodes that train: a node with batch size 0 does not."""
    is_host_training: bool
    global_batch: int
    samples_per_s: float
    """Throughput."""
    speedup: float | None
    efficiency: float | None
    energy: MachineEnergy | None
    """Energy of all machines; None where it is not known."""
    lost: tuple[str, ...]
    """Nodes that were lost on the way: the run had fewer for a part of it."""

    @property
    def joules_per_sample(self) -> float | None:
        """Energy of all machines for each sample."""
        return self.energy.joules_per_sample if self.energy else None


@dataclass(frozen=True)
class ScalingSeries:
    """Runs by the number of nodes."""

    points: tuple[ScalingPoint, ...]
    kind: str
    """One of the texts of KINDS."""
    host_samples_per_s: float | None
    host_source: str
    """What `host_samples_per_s` is from: runs without nodes, or TUNED."""
    origin: str

    @property
    def speedups(self) -> dict[int, float]:
        """Speed-up by the number of nodes; the host alone, measured in tuning, counts as none."""
        found = self.by_nodes([point.speedup for point in self.points])
        return {0: 1.0, **found} if found else {}

    def by_nodes(self, values: Sequence[float | None]) -> dict[int, float]:
        """Return those of `values` that are known, one for each point, by the number of nodes."""
        pairs = zip(self.points, values, strict=True)
        return {point.num_nodes: value for point, value in pairs if value is not None}


def build_scaling(runs: Sequence[RunResults], kind: str) -> ScalingSeries:
    """Put runs of one job, each with another number of nodes, in order; `kind` is one of KINDS."""
    without = [run.summary.samples_per_s for run in runs if _num_nodes(run) == 0]
    tuned = [rank.alone_samples_per_s for run in runs for rank in run.summary.ranks if rank.node == HOST_NAME]
    host = next(filter(None, [*without, *tuned]), None)
    points = tuple(sorted((_point(run, host) for run in runs), key=lambda point: point.num_nodes))
    return ScalingSeries(
        points,
        KINDS[kind],
        host,
        "runs without nodes" if without else TUNED if host else "",
        ", ".join(sorted({run.measured for run in runs})),
    )


def _num_nodes(run: RunResults) -> int:
    return sum(rank.node != HOST_NAME and rank.batch_size > 0 for rank in run.summary.ranks)


def _point(run: RunResults, host: float | None) -> ScalingPoint:
    summary = run.summary
    training = [rank for rank in summary.ranks if rank.batch_size > 0]
    alone = [rank.alone_samples_per_s for rank in training if rank.alone_samples_per_s]
    is_known = bool(alone) and len(alone) == len(training)
    return ScalingPoint(
        summary.run_id,
        _num_nodes(run),
        any(rank.node == HOST_NAME for rank in training),
        summary.global_batch,
        summary.samples_per_s,
        summary.samples_per_s / host if host else None,
        summary.samples_per_s / sum(alone) if is_known else None,
        summary.energy.whole if summary.energy else None,
        summary.lost_nodes,
    )


def describe_series(series: ScalingSeries) -> str:
    """Return what the series is, in a sentence."""
    host = f"; the host alone: {format_rate(series.host_samples_per_s)} samples/s, by {series.host_source}"
    known = host if series.host_samples_per_s else ""
    return f"{len(series.points)} runs, {series.origin}; {series.kind}{known}"


def scaling_charts(series: ScalingSeries) -> list[Chart]:
    """Return the charts of what is known: speed-up, efficiency, energy per image."""
    energy = [point.joules_per_sample for point in series.points]
    found = (
        ("Speed-up over the host alone", "times the host alone", series.speedups),
        ("Efficiency", "of standalone throughput", series.by_nodes([p.efficiency for p in series.points])),
        ("Energy per image", "J", series.by_nodes(energy)),
    )
    return [_chart(series, title, unit, values) for title, unit, values in found if values]


def _chart(series: ScalingSeries, title: str, unit: str, by_nodes: dict[int, float]) -> Chart:
    last = max(by_nodes)
    nodes, values = [float(number) for number in by_nodes], list(by_nodes.values())
    rows = [(str(number), f"{value:.4g}") for number, value in by_nodes.items()]
    return Chart(
        title,
        f"{by_nodes[last]:.3g} ({unit}) with {last} nodes.",
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
    return DataTable(header, tuple(rows)).without_empty_columns()


def energy_by_nodes(series: ScalingSeries) -> DataTable:
    """Return energy per image by the number of nodes, and what is saved against none: Table II."""
    without = series.by_nodes([point.joules_per_sample for point in series.points]).get(0)
    rows: list[tuple[str, ...]] = []
    for point in series.points:
        energy, each = point.energy, point.joules_per_sample
        if energy is None or each is None:
            rows.append((str(point.num_nodes), *["–"] * 5, "not known"))
            continue
        above_idle = energy.above_idle_joules
        rows.append(
            (
                str(point.num_nodes),
                f"{each:.4g}",
                "–" if not without else format_share(1 - each / without),
                f"{1 / each:.4g}",
                f"{energy.mean_watts:.1f} W" if energy.mean_watts else "–",
                "–" if above_idle is None else f"{above_idle / energy.samples:.4g}",
                energy.origin,
            )
        )
    header = ("nodes", "J/image", "saved", "images/J", "power", "J/image above idle", "source")
    return DataTable(header, tuple(rows)).without_empty_columns()


def scaling_document(series: ScalingSeries) -> dict[str, Any]:
    """Return the `csdctl.scaling/1` document."""
    points = []
    for point in series.points:
        energy, content = point.energy, {k: v for k, v in vars(point).items() if k != "energy"}
        content["joules_per_sample"] = point.joules_per_sample
        content["samples_per_joule"] = energy.samples_per_joule if energy else None
        content["energy_origin"] = energy.origin if energy else None
        points.append(content)
    return {"schema": "csdctl.scaling/1", **vars(series), "points": points}


def _remark(point: ScalingPoint) -> str:
    parts = [] if point.is_host_training else ["the host does not train"]
    if point.lost:
        parts.append(f"lost during the run: {format_node_names(point.lost)}")
    return "; ".join(parts)
