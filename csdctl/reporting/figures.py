"""The numbers of a report as tables: what they are, and whether they were measured, predicted or emulated."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from csdctl.fleet.names import format_node_names
from csdctl.reporting.bottleneck import find_bottleneck
from csdctl.reporting.charts import DataTable
from csdctl.reporting.numbers import (
    format_accuracy,
    format_bytes,
    format_loss,
    format_rate,
    format_seconds,
    format_share,
)
from csdctl.reporting.results import PREDICTED, STATED, RunResults
from csdctl.reporting.summary import RunSummary


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
