"""The energy of a run as text: a table for a page, and lines for a terminal."""

from csdctl.reporting.charts import DataTable
from csdctl.reporting.energy import MachineEnergy, RunEnergy
from csdctl.reporting.numbers import format_seconds, format_share
from csdctl.reporting.results import RunResults
from csdctl.runs.ledger import MEASURED

HEADER = (
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
        cells = _cells(found[node], run.measured) if node in found else ("–",) * 6 + ("not configured", "–")
        rows.append((node, *cells, cpu))
    if energy and energy.whole:
        cells = _cells(energy.whole, run.measured)
        rows.append(("all", *cells, format_seconds(sum(run.series.cpu_s.values()))))
    elif energy:
        rows.append(("all", "–", *[""] * 5, f"not known of {', '.join(energy.missing)}", "", ""))
    return DataTable(HEADER, tuple(rows))


def describe_energy(energy: RunEnergy) -> list[str]:
    """Return the energy in lines: of all if it is known, else of each machine."""
    if energy.whole:
        return [_line(energy.whole)]
    lines = [f"{machine.machine}: {_line(machine)}" for machine in energy.machines]
    return [*lines, f"not known of {', '.join(energy.missing)}, so not of all"]


def _line(machine: MachineEnergy) -> str:
    if not machine.seconds:
        return f"unknown ({machine.source}){f': {machine.error}' if machine.error else ''}"
    parts = [f"{machine.joules:,.0f} J {machine.origin} ({machine.source})"]
    if machine.above_idle_joules is not None:
        parts.append(f"{machine.above_idle_joules:,.0f} J above stated idle power")
    else:
        parts.append(_not_subtracted(machine))
    if machine.joules_per_sample and machine.samples_per_joule:
        parts.append(f"{machine.joules_per_sample:.3g} J/image, {machine.samples_per_joule:.3g} images/J")
    else:
        parts.append(f"known for {format_share(machine.coverage)} of the training")
    return ", ".join(parts)


def _not_subtracted(machine: MachineEnergy) -> str:
    """Return that the energy includes that of idle machines, and of which nobody has stated it."""
    of = f" of {', '.join(machine.idle_unknown)}" if machine.idle_unknown else ""
    return f"idle power included: idle_watts{of} is not in fleet.yaml"


def _cells(machine: MachineEnergy, measured: str) -> tuple[str, ...]:
    """Return what HEADER names, but for the machine and CPU time."""
    return (
        f"{machine.joules:,.1f} J" if machine.seconds else "–",
        "not stated" if machine.idle_watts is None else f"{machine.above_idle_joules:,.1f} J",
        _number(machine.mean_watts, "{:.2f} W"),
        _number(machine.joules_per_sample, "{:.3g}"),
        _number(machine.samples_per_joule, "{:.3g}"),
        format_share(machine.coverage),
        machine.source if not machine.error else f"{machine.source}: {machine.error}",
        measured if machine.origin == MEASURED else machine.origin,
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
