"""The fleet as frozen dataclasses; `reading` creates them from fleet.yaml."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.errors import InputError

HOST_NAME = "host"


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


@dataclass(frozen=True)
class Host:
    """The machine that csdctl runs on, as a rank; `threads` 0 means all cores."""

    threads: int = 0


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

    def python_of(self, machine: str) -> str:
        """Return the Python that runs the worker on `machine`."""
        return sys.executable if machine == HOST_NAME else self.node(machine).python

    def node(self, name: str) -> Node:
        """Return node `name`; raises InputError if it does not exist."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InputError(f"fleet {self.path} has no node {name!r}")
