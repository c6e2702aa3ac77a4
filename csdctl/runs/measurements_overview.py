"""A summary of the measurements: counts and extremes rather than every measurement."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from csdctl.fleet.hardware import FleetClass, MachineClass
from csdctl.runs import measurements_rows as rows
from csdctl.runs.measurements_file import MeasurementsFile
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    RuntimeSettings,
    TrialMeasurement,
)


@dataclass(frozen=True)
class ProbeSummary:
    """All probes of one model with one recipe, machine class and settings."""

    model: ModelProperties
    recipe: str
    machine_class: MachineClass
    settings: RuntimeSettings
    num_probes: int
    smallest: int | None
    """Of the batch sizes that fitted in memory; None: none did."""
    largest: int | None
    too_large: int | None
    """The smallest batch size that did not fit; None: all did."""
    best_batch_size: int | None
    best_samples_per_s: float | None
    measured_at: float
    """Unix time of the newest."""


@dataclass(frozen=True)
class CollectiveSummary:
    """All sums by one collective, of one size and number of ranks, on one fleet class."""

    fleet_class: FleetClass
    name: str
    num_ranks: int
    num_bytes: int
    num_measured: int
    median_s: float
    measured_at: float
    """Unix time of the newest."""


@dataclass(frozen=True)
class TrialSummary:
    """One trial of a plan."""

    model: ModelProperties
    recipe: str
    fleet_class: FleetClass
    trial: TrialMeasurement


@dataclass(frozen=True)
class Overview:
    """Everything: probes by model, sums by fleet, trials oldest first."""

    probed: tuple[ProbeSummary, ...] = ()
    summed: tuple[CollectiveSummary, ...] = ()
    tried: tuple[TrialSummary, ...] = ()


def load_overview(file: MeasurementsFile) -> Overview:
    """Summarize `file`; raises CsdctlError when it cannot be read."""
    with file.reading() as connection:
        machines = rows.select_machine_classes(connection)
        fleets = rows.select_fleet_classes(connection)
        models = {model.hash: model for model in rows.select_models(connection)}
        keys = connection.execute("SELECT DISTINCT model, recipe, machine_class FROM probes").fetchall()
        probes = {key: rows.select_probes(connection, key) for key in keys}
        collectives = connection.execute(
            f"SELECT fleet_class, {rows.COLLECTIVE_COLUMNS} FROM collectives"
        ).fetchall()
        trials = connection.execute(
            f"SELECT model, recipe, fleet_class, {rows.TRIAL_COLUMNS} FROM trials ORDER BY measured_at, id"
        ).fetchall()
    order = {key: number for number, key in enumerate(models)}
    return Overview(
        probed=tuple(
            _summarize_probes(models[key[0]], key[1], machines[key[2]], settings, of_settings)
            for key in sorted(probes, key=lambda key: (order[key[0]], *key[1:]))
            for settings, of_settings in sorted(_by_settings(probes[key]).items())
        ),
        summed=_summarize_sums(collectives, fleets),
        tried=tuple(
            TrialSummary(models[model], recipe, fleets[fleet], rows.trial_of(tuple(row)))
            for model, recipe, fleet, *row in trials
        ),
    )


def _by_settings(probes: list[ProbeMeasurement]) -> dict[RuntimeSettings, list[ProbeMeasurement]]:
    found: dict[RuntimeSettings, list[ProbeMeasurement]] = defaultdict(list)
    for probe in probes:
        found[probe.settings].append(probe)
    return found


def _summarize_probes(
    model: ModelProperties,
    recipe: str,
    machine_class: MachineClass,
    settings: RuntimeSettings,
    probes: list[ProbeMeasurement],
) -> ProbeSummary:
    fitting = [probe.batch_size for probe in probes if probe.has_fitted]
    best = max(
        (probe for probe in probes if probe.has_fitted),
        key=lambda probe: probe.samples_per_s or 0.0,
        default=None,
    )
    return ProbeSummary(
        model,
        recipe,
        machine_class,
        settings,
        num_probes=len(probes),
        smallest=min(fitting, default=None),
        largest=max(fitting, default=None),
        too_large=min((probe.batch_size for probe in probes if not probe.has_fitted), default=None),
        best_batch_size=best.batch_size if best else None,
        best_samples_per_s=best.samples_per_s if best else None,
        measured_at=max(probe.measured_at for probe in probes),
    )


def _summarize_sums(
    found: Iterable[tuple[Any, ...]], fleets: Mapping[str, FleetClass]
) -> tuple[CollectiveSummary, ...]:
    groups: dict[tuple[str, str, int, int], list[CollectiveMeasurement]] = defaultdict(list)
    for fleet_class, *row in found:
        sums = CollectiveMeasurement(*row)
        groups[fleet_class, sums.name, sums.num_ranks, sums.num_bytes].append(sums)
    return tuple(
        CollectiveSummary(
            fleets[fleet_class],
            name,
            num_ranks,
            num_bytes,
            num_measured=len(group),
            median_s=median(sums.seconds for sums in group),
            measured_at=max(sums.measured_at for sums in group),
        )
        for (fleet_class, name, num_ranks, num_bytes), group in sorted(groups.items())
    )
