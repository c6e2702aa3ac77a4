"""The energy of a run from its power.jsonl: per machine and whole, in total and above idle. Pure.

Nothing is extrapolated: energy per sample is given only where the energy of the whole training is known.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from csdctl.fleet.model import HOST_NAME, SERVER_MARK
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_share
from csdctl.runs.ledger import MEASURED, STATED, PowerRecord

ENOUGH = 0.98
"""The share of the training whose energy must be known; the rest is the first and the last second."""


COMPUTED = ("coverage", "mean_watts", "above_idle_joules", "joules_per_sample")


@dataclass
class MachineEnergy:
    """The energy of one machine while the run trained, or of all."""

    machine: str
    source: str
    origin: str
    """`ledger.MEASURED` or STATED."""
    window_s: float
    """Seconds in which the run trained, without those between its end and a resume."""
    joules: float = 0.0
    seconds: float = 0.0
    """The part of the window in which the energy is known."""
    idle_watts: float | None = None
    includes_nodes: bool = False
    samples: int = 0
    error: str = ""
    idle_unknown: tuple[str, ...] = ()
    """In the sum of all machines: those whose idle power is not stated, so that none is subtracted."""

    @property
    def coverage(self) -> float:
        """The share of the training whose energy is known, 0…1."""
        return min(self.seconds / self.window_s, 1.0) if self.window_s > 0 else 0.0

    @property
    def mean_watts(self) -> float | None:
        """While the energy is known."""
        return self.joules / self.seconds if self.seconds else None

    @property
    def above_idle_joules(self) -> float | None:
        """Energy without that of the idle machine. None where its idle power is not known."""
        return None if self.idle_watts is None else self.joules - self.idle_watts * self.seconds

    @property
    def joules_per_sample(self) -> float | None:
        """Energy for each sample that was computed. None unless that of the whole training is known."""
        return self.joules / self.samples if self.coverage >= ENOUGH and self.samples else None


@dataclass(frozen=True)
class RunEnergy:
    """The energy of a run, by machine and of all together."""

    machines: tuple[MachineEnergy, ...]
    whole: MachineEnergy | None
    """None as long as the energy of a machine that takes part is not known."""
    missing: tuple[str, ...]
    """Machines whose energy is not known, or not of the whole training."""


def _server_of(name: str, names: Sequence[str]) -> str:
    """Return the machine whose chassis a node is in, '' for a server itself."""
    server, mark, _ = name.partition(SERVER_MARK)
    if not any(SERVER_MARK in one for one in names):
        return HOST_NAME if name != HOST_NAME else ""
    return (server if server in names else HOST_NAME) if mark else ""


def add_up_energy(
    records: Iterable[PowerRecord],
    nodes: Sequence[str],
    samples: Mapping[str, int],
    spans: Sequence[tuple[float, float]],
) -> RunEnergy:
    """Add up what was spent in `spans`, start and end in Unix time, on the machines `nodes` of the ranks.

    `samples` were computed by each in that time. A record counts with the share of it that lies inside.
    """
    window_s = sum(end_s - start_s for start_s, end_s in spans)
    found: dict[str, MachineEnergy] = {}
    for record in records:
        if record.machine not in nodes:
            continue
        machine = found.get(record.machine)
        if machine is None or machine.source != record.source:
            machine = found[record.machine] = MachineEnergy(
                record.machine, record.source, record.origin, window_s
            )
            machine.samples = samples.get(record.machine, 0)
        machine.idle_watts, machine.includes_nodes = record.idle_watts, record.includes_nodes
        machine.error = record.error or machine.error
        if record.joules is None or not record.seconds:
            continue
        inside_s = sum(
            max(0.0, min(record.time, end_s) - max(record.time - record.seconds, start_s))
            for start_s, end_s in spans
        )
        machine.seconds += inside_s
        machine.joules += record.joules * min(inside_s / record.seconds, 1.0)
    covering = {name for name, machine in found.items() if machine.includes_nodes}
    needed = tuple(name for name in nodes if (_server_of(name, nodes) or name) not in covering - {name})
    missing = tuple(name for name in needed if name not in found or found[name].coverage < ENOUGH)
    machines = tuple(found[name] for name in nodes if name in found)
    if missing or not machines:
        return RunEnergy(machines, None, missing if machines else ())
    parts = [found[name] for name in needed]
    idle = [part.idle_watts for part in parts]
    whole = MachineEnergy(
        "whole",
        ", ".join(sorted({part.source for part in parts})),
        MEASURED if all(part.origin == MEASURED for part in parts) else STATED,
        parts[0].window_s,
        joules=sum(part.joules for part in parts),
        seconds=min(part.seconds for part in parts),
        idle_watts=None if None in idle else sum(watts for watts in idle if watts is not None),
        samples=sum(samples.values()),
        idle_unknown=tuple(part.machine for part in parts if part.idle_watts is None),
    )
    return RunEnergy(machines, whole, ())


def energy_document(energy: RunEnergy) -> dict[str, Any]:
    """Return the energy of a run as JSON has it. Null for what is not known."""

    def show(machine: MachineEnergy) -> dict[str, Any]:
        return asdict(machine) | {name: getattr(machine, name) for name in COMPUTED}

    return {
        "machines": [show(machine) for machine in energy.machines],
        "whole": show(energy.whole) if energy.whole else None,
        "missing": list(energy.missing),
    }


def describe_energy(energy: RunEnergy) -> list[str]:
    """Return the energy in lines: of all if it is known, else of each machine."""
    if energy.whole:
        return [describe_machine(energy.whole)]
    lines = [f"{machine.machine}: {describe_machine(machine)}" for machine in energy.machines]
    names = format_node_names(energy.missing)
    return [*lines, f"no total: known for less than {ENOUGH:.0%} of the training on {names}"]


def describe_machine(machine: MachineEnergy) -> str:
    """Return the energy of one machine, or of all, in a line."""
    if not machine.seconds:
        return f"unknown ({machine.source}){f': {machine.error}' if machine.error else ''}"
    parts = [f"{machine.joules:,.0f} J {machine.origin} ({machine.source})"]
    if machine.above_idle_joules is not None:
        parts.append(f"{machine.above_idle_joules:,.0f} J above stated idle power")
    else:
        of = f" of {', '.join(machine.idle_unknown)}" if machine.idle_unknown else ""
        parts.append(f"idle power included: idle_watts{of} is not in fleet.yaml")
    if machine.joules_per_sample:
        parts.append(f"{machine.joules_per_sample:.3g} J/image")
    else:
        parts.append(f"known for {format_share(machine.coverage)} of the training")
    return ", ".join(parts)
