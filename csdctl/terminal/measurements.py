"""Stored measurements, as tables and as JSON."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from csdctl.fleet.hardware import FleetClass, MachineClass
from csdctl.reporting.numbers import format_bytes, format_date, format_rate, format_seconds, format_share
from csdctl.runs.measurements import Overview, ProbeSummary
from csdctl.terminal.console import PrintableConsole, build_table
from csdctl.tuning.measurements import ModelProperties, TrialMeasurement, describe_runtime

SCHEMA = "csdctl.measurements/1"
NUM_TRIALS = 20
"""The newest trials, which the table shows; the document has all."""
SHOWN_LENGTH = 6
"""Characters of a hash; enough to distinguish a project's machines and recipes."""


def render_measurements(console: PrintableConsole, overview: Overview, path: str) -> None:
    """Print probes, collectives and trials, and the machines they were measured on."""
    if overview == Overview():
        console.print("no measurements yet: `csdctl tune` stores what it measures")
        return
    for title, columns, rows in _list_tables(overview):
        if rows:
            console.print(build_table(columns, rows, title=title))
    if (num_older := len(overview.tried) - NUM_TRIALS) > 0:
        console.print(f"{num_older} older trials are not shown")
    for machine in _list_machines(overview):
        line = f"machine {machine.key[:SHOWN_LENGTH]}: {machine.name} ({machine.software})"
        console.print(line, soft_wrap=True)
    console.print(f"measurements: {path}", soft_wrap=True)


def measurements_document(overview: Overview, path: str) -> dict[str, Any]:
    """Return the `csdctl.measurements/1` document; times are Unix times."""
    machines = {one.key: {**vars(one), "name": one.name} for one in _list_machines(overview)}
    probes = [
        {
            **vars(summary),
            "model": _model_document(summary.model),
            "machine_class": summary.machine_class.key,
            "is_emulated": summary.machine_class.is_emulated,
        }
        for summary in overview.probed
    ]
    return {
        "schema": SCHEMA,
        "path": path,
        "machine_classes": machines,
        "probes": probes,
        "collectives": [{**vars(one), **_fleet_document(one.fleet_class)} for one in overview.summed],
        "trials": [
            {
                "model": _model_document(tried.model),
                "recipe": tried.recipe,
                **_fleet_document(tried.of),
                **vars(tried.value),
            }
            for tried in overview.tried
        ],
    }


def _list_tables(overview: Overview) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Yield the title, the columns and the rows of each table."""
    columns = ("~model", "~recipe", "machine", "~settings", ">probes", ">batch sizes", ">samples/s", ">when")
    probed = [
        (
            summary.model.short_name,
            summary.recipe[:SHOWN_LENGTH],
            summary.machine_class.key[:SHOWN_LENGTH],
            describe_runtime(summary.settings),
            str(summary.num_probes),
            _show_sizes(summary),
            format_rate(summary.best_samples_per_s),
            format_date(summary.measured_at),
        )
        for summary in overview.probed
    ]
    yield "probes", columns, probed
    summed = [
        (
            sums.name,
            _show_fleet(sums.fleet_class),
            str(sums.num_ranks),
            format_bytes(sums.num_bytes),
            str(sums.num_measured),
            format_seconds(sums.median_s),
            format_date(sums.measured_at),
        )
        for sums in overview.summed
    ]
    yield "collectives", ("collective", "~fleet", ">ranks", ">vector", ">count", ">median", ">when"), summed
    tried = [
        (
            one.model.short_name,
            _show_fleet(one.of),
            _show_batch_sizes(one.value),
            format_rate(one.value.predicted_samples_per_s),
            format_rate(one.value.samples_per_s),
            format_share(_achieved_share(one.value)),
            format_date(one.value.measured_at),
        )
        for one in overview.tried[-NUM_TRIALS:]
    ]
    rates = (">predicted\nsamples/s", ">achieved\nsamples/s")
    yield "trials of plans", ("~model", "~fleet", "~batch sizes", *rates, ">share", ">when"), tried


def _list_machines(overview: Overview) -> list[MachineClass]:
    """Return each class once, in order of first use."""
    fleets = [sums.fleet_class for sums in overview.summed]
    fleets += [trial.of for trial in overview.tried]
    of_fleets = [machine for fleet in fleets for machine in (fleet.host, *fleet.nodes)]
    return list(dict.fromkeys([*(summary.machine_class for summary in overview.probed), *of_fleets]))


def _show_fleet(fleet: FleetClass) -> str:
    """Show the host's class, the nodes' classes, and the network."""
    machines = " + ".join(machine.key[:SHOWN_LENGTH] for machine in (fleet.host, *fleet.nodes))
    return machines + (f", {fleet.network}" if fleet.network else "")


def _show_sizes(probed: ProbeSummary) -> str:
    """Show 4–64, or 4–64 <128 when 128 did not fit in memory."""
    if probed.smallest is None:
        return f"<{probed.too_large}"
    sizes = (
        f"{probed.smallest}–{probed.largest}" if probed.smallest != probed.largest else f"{probed.largest}"
    )
    return sizes if probed.too_large is None else f"{sizes} <{probed.too_large}"


def _show_batch_sizes(trial: TrialMeasurement) -> str:
    """Show the host's batch size, then those of the nodes, with equal sizes grouped: 128 + 4 × 32."""
    groups = [
        (size, len(list(group))) for size, group in groupby(rank.batch_size for rank in trial.ranks[1:])
    ]
    shown = [f"{number} × {size}" if number > 1 else str(size) for size, number in groups]
    return " + ".join([str(trial.ranks[0].batch_size), *shown])


def _achieved_share(trial: TrialMeasurement) -> float | None:
    """Return the achieved share of the predicted rate."""
    return trial.samples_per_s / trial.predicted_samples_per_s if trial.predicted_samples_per_s else None


def _model_document(model: ModelProperties) -> dict[str, Any]:
    return {**vars(model), "vector_bytes": model.vector_bytes}


def _fleet_document(fleet: FleetClass) -> dict[str, Any]:
    classes = {"host": fleet.host.key, "nodes": [node.key for node in fleet.nodes], "network": fleet.network}
    return {"fleet_class": {"key": fleet.key, **classes}, "is_emulated": fleet.is_emulated}
