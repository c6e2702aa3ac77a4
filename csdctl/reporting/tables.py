"""The results of runs as rows of text, for the terminal and for the HTML report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from csdctl.fleet.names import format_node_names
from csdctl.reporting.energy import describe_energy, describe_machine
from csdctl.reporting.numbers import (
    format_bytes,
    format_loss,
    format_rate,
    format_seconds,
    format_share,
    name_metrics,
)
from csdctl.reporting.privacy import describe_privacy
from csdctl.reporting.results import RunResults, RunSummary
from csdctl.reporting.series import find_bottleneck
from csdctl.tuning.plan import DATA_PARALLEL, SPLIT

REACHABLE = {DATA_PARALLEL: "the ranks reach alone", SPLIT: "the busiest rank reaches without waiting"}
IDENTICAL = "identical on all ranks at the end of every epoch"


@dataclass(frozen=True)
class DataTable:
    """Rows of text under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def describe_run(summary: RunSummary) -> list[tuple[str, str]]:
    """Return name and text of each result of a run."""
    training = name_metrics(summary.accuracy, summary.metrics)
    validation = name_metrics(summary.validation_accuracy, summary.validation_metrics)
    cut = f" behind {summary.cut}" if summary.cut else ""
    rows = [
        ("samples/s", _describe_speed(summary)),
        ("efficiency", _describe_efficiency(summary)),
        *(
            (name, _both(validation.get(name), training.get(name)))
            for name in dict.fromkeys([*training, *validation])
        ),
        ("loss", _both(summary.validation_loss, summary.loss)),
        (
            "trained",
            f"{summary.epochs} epochs, {summary.steps:,} steps of {summary.global_batch}, "
            f"{summary.samples:,} samples in {format_seconds(summary.training_s)}",
        ),
        ("strategy", f"{summary.strategy}{cut}, batch sizes by {summary.method}"),
        ("weights", IDENTICAL if summary.identical_weights else "NOT compared"),
    ]
    rows += [("energy", line) for line in describe_energy(summary.energy)] if summary.energy else []
    rows += [("privacy", line) for line in describe_privacy(summary.privacy)] if summary.privacy else []
    if summary.lost_nodes:
        unread = f"; {summary.num_private_unread:,} private samples were not read"
        lost = f"{format_node_names(summary.lost_nodes)}; training continued without them"
        rows.append(("lost", lost + (unread if summary.num_private_unread else "")))
    if summary.num_unreadable:
        rows.append(("events", f"{summary.num_unreadable:,} lines could not be read, and are left out"))
    if summary.num_rebalanced:
        rows.append(("balance", f"batch sizes changed {summary.num_rebalanced} times"))
    return rows


def _both(validation: float | None, training: float | None) -> str:
    return f"{format_loss(validation)} validation, {format_loss(training)} training"


def _describe_speed(summary: RunSummary) -> str:
    text = f"{format_rate(summary.samples_per_s)}, {format_rate(summary.step_samples_per_s)} while stepping"
    if summary.predicted_samples_per_s is not None:
        text += f"; predicted {format_rate(summary.predicted_samples_per_s)}"
    host = summary.ranks[0].alone_samples_per_s if summary.ranks else None
    return text + (f"; {summary.step_samples_per_s / host:.2f} × the host alone" if host else "")


def _describe_efficiency(summary: RunSummary) -> str:
    if summary.efficiency is None or summary.strategy not in REACHABLE:
        is_parallel = summary.strategy == DATA_PARALLEL
        return f"unknown: {'no rank was measured alone' if is_parallel else f'strategy {summary.strategy}'}"
    alone = format_rate(summary.alone_samples_per_s)
    return f"{format_share(summary.efficiency)} of the {alone} samples/s that {REACHABLE[summary.strategy]}"


def compare_results(runs: Sequence[RunResults]) -> DataTable:
    """Return the results of runs side by side."""
    found: list[dict[str, str]] = []
    for run in runs:
        texts = {"state": f"{run.summary.state}, {run.measured}"}
        for name, text in describe_run(run.summary):
            texts[name] = f"{texts[name]}; {text}" if name in texts else text
        found.append(texts)
    names = dict.fromkeys(name for texts in found for name in texts)
    rows = tuple((name, *(texts.get(name, "–") for texts in found)) for name in names)
    return DataTable(("", *(run.summary.run_id for run in runs)), rows)


def tabulate_ranks(summary: RunSummary) -> DataTable:
    """Return the samples, the rates and the waiting of each rank."""
    rows = tuple(
        (
            str(rank.rank),
            rank.node,
            str(rank.batch_size),
            f"{rank.num_private:,}",
            f"{rank.num_public:,}",
            format_rate(rank.samples_per_s),
            format_rate(rank.alone_samples_per_s),
            format_share(rank.waiting),
        )
        for rank in summary.ranks
    )
    header = ("rank", "node", "batch size", "private", "public", "samples/s", "alone", "waiting")
    return DataTable(header, rows)


def tabulate_faults(run: RunResults) -> DataTable:
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


def tabulate_bottleneck(run: RunResults) -> DataTable:
    """Return the rank that held the others back, since when and why; no row if none did."""
    bottleneck = find_bottleneck(run.series)
    if bottleneck is None:
        return DataTable((), ())
    rank, text = bottleneck.rank, bottleneck.why
    if rank is not None:
        held = f"held the others back for {bottleneck.lost_s:.1f} s"
        text = f"{run.series.nodes[rank]} (rank {rank}) {held}: {text}"
    row = (f"{bottleneck.since_s:.0f} s", bottleneck.cause, text)
    return DataTable(("since", "cause", f"what shows it ({run.measured})"), (row,))


def tabulate_energy(run: RunResults) -> DataTable:
    """Return the energy of each machine whose power was read, and of all."""
    energy = run.summary.energy
    if energy is None:
        return DataTable((), ())
    rows = [(machine.machine, describe_machine(machine)) for machine in energy.machines]
    return DataTable(("machine", "energy"), (*rows, ("all", describe_energy(energy)[-1])))


FACTS = {
    "processor": "cpu_model",
    "architecture": "architecture",
    "cores": "num_cores",
    "CPU limit": "cpu_limit",
    "memory": "memory_bytes",
    "memory limit": "memory_limit_bytes",
    "Python": "python_version",
    "TensorFlow": "tensorflow_version",
    "Keras": "keras_version",
    "MPI": "mpi_version",
}
"""Columns of `tabulate_machines`, and the fields of the facts that they show."""


def tabulate_machines(run: RunResults) -> DataTable:
    """Return the hardware and software of each machine, as found by `discover`, and the memory it used."""
    facts, rows = _facts(run), []
    for rank, node in enumerate(run.series.nodes):
        known = facts.get(node, {})
        cells = [_show_fact(field, known.get(field)) for field in FACTS.values()]
        rows.append((node, *cells, format_bytes(run.series.peak_memory_bytes.get(rank))))
    versions = run.manifest.get("versions")
    version = run.manifest.get("csdctl", "–")
    others = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, Mapping) else ""
    rows.append(("controller", f"csdctl {version}, {others}", *[""] * len(FACTS)))
    return DataTable(("machine", *FACTS, "peak memory of the rank"), tuple(rows))


def _facts(run: RunResults) -> dict[str, Mapping[str, Any]]:
    """Return what the manifest has about each machine, which may have been edited."""
    fleet = run.manifest.get("fleet")
    facts = fleet.get("facts") if isinstance(fleet, Mapping) else None
    found = facts if isinstance(facts, Mapping) else {}
    return {node: known for node, known in found.items() if isinstance(known, Mapping)}


def _show_fact(field: str, value: object) -> str:
    if field.endswith("_bytes") and isinstance(value, int | float):
        return format_bytes(value)
    return "–" if value is None else str(value)
