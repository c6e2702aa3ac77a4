"""The fleet as frozen dataclasses; `reading` creates them from fleet.yaml."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.errors import InputError

HOST_NAME = "host"


@dataclass(frozen=True)
class PowerSource:
    """How the power of one machine is known; watts of the whole machine, or of what the source covers."""

    source: str
    """One of `fleet.power.SourceName`."""
    path: str = ""
    """hwmon: a pattern of files on the machine. csv: a file on the host."""
    url: str = ""
    credentials: Path | None = None
    """A file with `user:password` for `url`."""
    certificate: Path | None = None
    """The certificate of `url`, where no authority has signed it."""
    watts: float | None = None
    """Of a constant."""
    idle_watts: float | None = None
    """Of the machine when nothing is trained, as stated by the user."""
    includes_nodes: bool = False
    """Of the host: the reading has the power of the nodes in its chassis."""


@dataclass(frozen=True)
class Node:
    """A machine that is reached over SSH and trains."""

    name: str
    address: str
    port: int = 22
    user: str = "root"
    key: Path | None = None
    python: str = "python3"
    groups: tuple[str, ...] = ()
    jump: "Node | None" = None
    """The jump host of the connection, which may have a jump host itself."""
    power: PowerSource | None = None
    """None: its power is not read."""


@dataclass(frozen=True)
class Host:
    """The machine that csdctl runs on, as a rank; `threads` 0 means all cores."""

    threads: int = 0
    power: PowerSource | None = None


@dataclass(frozen=True)
class Fleet:
    """The host and its nodes, as written in fleet.yaml."""

    nodes: tuple[Node, ...]
    host: Host = field(default_factory=Host)
    network: str = ""
    """The network, as CIDR, that MPI uses between the machines; '' lets MPI choose."""
    emulated: bool = False
    path: Path = Path("fleet.yaml")

    @property
    def machines(self) -> tuple[str, ...]:
        """The names of the host and all nodes, the host first."""
        return (HOST_NAME, *(node.name for node in self.nodes))

    def power_of(self, machine: str) -> PowerSource | None:
        """Return how the power of `machine` is known."""
        return self.host.power if machine == HOST_NAME else self.node(machine).power

    def python_of(self, machine: str) -> str:
        """Return the Python that runs the worker on `machine`."""
        return sys.executable if machine == HOST_NAME else self.node(machine).python

    def node(self, name: str) -> Node:
        """Return node `name`; raises InputError if it does not exist."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InputError(f"fleet {self.path} has no node {name!r}")
