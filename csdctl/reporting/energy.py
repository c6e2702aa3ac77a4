"""The energy of a run from its power.jsonl: of each machine and of all, in total and above idle. Pure.

Nothing is extrapolated: energy per sample is given only where the energy of the whole training is known.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from csdctl.fleet.model import HOST_NAME, SERVER_MARK
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_share
from csdctl.runs.ledger import MEASURED, STATED, PowerRecord

ENOUGH = 0.98
"""The share of the training whose energy must be known. The first and the last second may be missing."""


@dataclass
class MachineEnergy:
    """The energy of one machine while the run trained, or of all."""

    machine: str
    source: str
    origin: str
    """'measured' or 'stated'."""
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

    JSON_PROPERTIES: ClassVar = ("coverage", "mean_watts", "above_idle_joules", "joules_per_sample")

    @property
    def coverage(self) -> float:
        """The share of the training whose energy is known."""
        return min(self.seconds / self.window_s, 1.0) if self.window_s > 0 else 0.0

    @property
    def mean_watts(self) -> float | None:
        """Mean power while the energy is known. None where it never is."""
        return self.joules / self.seconds if self.seconds else None

    @property
    def above_idle_joules(self) -> float | None:
        """Energy above the idle power of the machine. None where its idle power is not known."""
        return None if self.idle_watts is None else self.joules - self.idle_watts * self.seconds

    @property
    def joules_per_sample(self) -> float | None:
        """Energy for each sample. None unless the energy of all the training is known."""
        return self.joules / self.samples if self.coverage >= ENOUGH and self.samples else None

    def describe(self) -> str:
        """Return the energy in a line."""
        if not self.seconds:
            return f"unknown ({self.source})" + f": {self.error}" * bool(self.error)
        if self.above_idle_joules is not None:
            idle = f"{self.above_idle_joules:,.0f} J above stated idle power"
        else:
            names = f" of {', '.join(self.idle_unknown)}" if self.idle_unknown else ""
            idle = f"idle power included: idle_watts{names} is not in fleet.yaml"
        per_sample = f"known for {format_share(self.coverage)} of the training"
        if self.joules_per_sample:
            per_sample = f"{self.joules_per_sample:.3g} J/image"
        return f"{self.joules:,.0f} J {self.origin} ({self.source}), {idle}, {per_sample}"


@dataclass(frozen=True)
class RunEnergy:
    """The energy of a run, by machine and of all together."""

    machines: tuple[MachineEnergy, ...]
    whole: MachineEnergy | None
    """None as long as the energy of a machine that takes part is not known."""
    missing: tuple[str, ...]
    """Machines whose energy is not known, or not of the whole training."""

    def describe(self) -> list[tuple[str, str]]:
        """Return each machine, then 'all', with its energy in a line."""
        names = format_node_names(self.missing)
        total = f"no total: known for less than {ENOUGH:.0%} of the training on {names}"
        lines = [(machine.machine, machine.describe()) for machine in self.machines]
        return [*lines, ("all", self.whole.describe() if self.whole else total)]

    def describe_total(self) -> list[str]:
        """Return the energy in lines: of all if it is known, else of each machine."""
        *machines, (_, total) = self.describe()
        return [*(f"{name}: {text}" for name, text in machines if not self.whole), total]


def add_up_energy(
    records: Iterable[PowerRecord],
    nodes: Sequence[str],
    samples: Mapping[str, int],
    spans: Sequence[tuple[float, float]],
) -> RunEnergy:
    """Add up what the machines `nodes` of the ranks spent in `spans`, start and end in Unix time.

    `samples` were computed by each in that time. A record counts with the share of it that lies inside.
    """
    window_s = sum(end_s - start_s for start_s, end_s in spans)
    machines: dict[str, MachineEnergy] = {}
    for record in records:
        if record.machine not in nodes:
            continue
        machine = machines.get(record.machine)
        if machine is None or machine.source != record.source:
            machine = MachineEnergy(record.machine, record.source, record.origin, window_s)
            machine.samples = samples.get(record.machine, 0)
            machines[record.machine] = machine
        machine.idle_watts, machine.includes_nodes = record.idle_watts, record.includes_nodes
        machine.error = record.error or machine.error
        if record.joules is None or not record.seconds:
            continue
        begin_s = record.time - record.seconds
        inside_s = sum(max(0.0, min(record.time, end_s) - max(begin_s, start_s)) for start_s, end_s in spans)
        machine.seconds += inside_s
        machine.joules += record.joules * min(inside_s / record.seconds, 1.0)
    covering = {name for name, machine in machines.items() if machine.includes_nodes}
    needed = [name for name in nodes if (_server_of(name, nodes) or name) not in covering - {name}]
    missing = tuple(name for name in needed if name not in machines or machines[name].coverage < ENOUGH)
    in_order = tuple(machines[name] for name in nodes if name in machines)
    if missing or not machines:
        return RunEnergy(in_order, None, missing if machines else ())
    parts = [machines[name] for name in needed]
    idle_unknown = tuple(part.machine for part in parts if part.idle_watts is None)
    whole_run = MachineEnergy(
        "whole",
        ", ".join(sorted({part.source for part in parts})),
        MEASURED if all(part.origin == MEASURED for part in parts) else STATED,
        window_s,
        joules=sum(part.joules for part in parts),
        seconds=min(part.seconds for part in parts),
        idle_watts=None if idle_unknown else sum(part.idle_watts or 0.0 for part in parts),
        samples=sum(samples.values()),
        idle_unknown=idle_unknown,
    )
    return RunEnergy(in_order, whole_run, ())


def _server_of(name: str, names: Sequence[str]) -> str:
    """Return the machine whose chassis a node is in. '' for a server itself."""
    server, mark, _ = name.partition(SERVER_MARK)
    if not any(SERVER_MARK in machine for machine in names):
        return HOST_NAME if name != HOST_NAME else ""
    return (server if server in names else HOST_NAME) if mark else ""
