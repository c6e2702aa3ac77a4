"""Use cases of `csdctl emulate`: start an emulated fleet, show its status, stop it."""

from dataclasses import dataclass
from pathlib import Path

from csdctl.emulation.fleet import NodeStatus, StoppedFleet, fleet_status, is_up, start_fleet, stop_fleet
from csdctl.emulation.state import EmulatedSpec, parse_size

STATE_DIRECTORY = Path(".csdctl", "emulated")
"""Below the project directory."""


@dataclass(frozen=True)
class EmulatedFleet:
    """An emulated fleet that is up; `was_up` when it was running before."""

    fleet_path: Path
    nodes: tuple[NodeStatus, ...]
    was_up: bool = False
    owner_pid: int | None = None
    """The process whose end ends it."""


def bring_fleet_up(
    project: Path,
    *,
    num_nodes: int,
    cpu: float,
    memory: str,
    fleet_path: Path,
    cpu_mechanism: str = "auto",
    owner_pid: int | None = None,
) -> EmulatedFleet:
    """Start `num_nodes` nodes with `cpu` cores and `memory` (such as 2G) each, unless they run already.

    They end with process `owner_pid`, if it is given. Raises InputError for values that this machine cannot
    provide, and when another emulated fleet is up.
    """
    directory = project / STATE_DIRECTORY
    spec = EmulatedSpec(num_nodes, cpu, parse_size(memory))
    was_up = is_up(directory)
    written = start_fleet(
        directory, spec, fleet_path=fleet_path, cpu_mechanism=cpu_mechanism, owner_pid=owner_pid
    )
    return EmulatedFleet(written, tuple(fleet_status(directory)), was_up, owner_pid)


def read_fleet_status(project: Path) -> tuple[NodeStatus, ...]:
    """Return the status of every emulated node of the project; raises InputError when there is none."""
    return tuple(fleet_status(project / STATE_DIRECTORY))


def take_fleet_down(project: Path) -> StoppedFleet:
    """Stop the project's emulated fleet and remove its files, even after a crash."""
    return stop_fleet(project / STATE_DIRECTORY)
