"""The fleet as frozen values, and fleet.yaml as pydantic reads it.

`load_fleet` is the only way from the file to a Fleet. Names, users and addresses go through an
allow-list here, because they end up in ssh_config files and command lines.
"""

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from csdctl.documents import Document, load_document
from csdctl.errors import InputError

HOST_NAME = "host"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:%_-]{0,253}")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")


@dataclass(frozen=True)
class Node:
    """One machine that is reached by SSH and trains."""

    name: str
    address: str
    port: int = 22
    user: str = "root"
    key: Path | None = None
    python: str = "python3"
    group: str = ""
    tags: tuple[str, ...] = ()
    jump: "Node | None" = None
    """The machine whose SSH server the connection goes through; may have one of its own."""


@dataclass(frozen=True)
class Host:
    """The machine csdctl runs on, as a rank; `threads` 0 means all its cores."""

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

    def node(self, name: str) -> Node:
        """The node called `name`; raises InputError when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InputError(f"fleet {self.path} has no node {name!r}")


def _matching(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"not a usable {what}")
        return value

    return AfterValidator(check)


Name = Annotated[str, _matching(_NAME, "name (letters, digits, '.', '_', '-')")]
Address = Annotated[str, _matching(_ADDRESS, "address or host name")]
User = Annotated[str, _matching(_USER, "user name")]
Port = Annotated[int, Field(ge=1, le=65535)]


def _as_network(value: str) -> str:
    return str(ipaddress.ip_network(value, strict=False)) if value else value


Network = Annotated[str, AfterValidator(_as_network)]
Python = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f]+$")]


class NodeDefaults(Document):
    """What every node has unless it says otherwise."""

    port: Port = 22
    user: User = "root"
    key: Path | None = None
    python: Python = "python3"
    group: str = ""


class NodeEntry(Document):
    """One node in fleet.yaml."""

    name: Name
    address: Address
    port: Port | None = None
    user: User | None = None
    key: Path | None = None
    python: Python | None = None
    group: str | None = None
    tags: list[str] = []


class HostEntry(Document):
    """The host's part of fleet.yaml."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0


class FleetFile(Document):
    """fleet.yaml."""

    host: HostEntry = HostEntry()
    network: Network = ""
    emulated: bool = False
    defaults: NodeDefaults = NodeDefaults()
    nodes: list[NodeEntry]


def load_fleet(path: Path) -> Fleet:
    """Read fleet.yaml; raises InputError for bad content, no node, or a name used twice."""
    file = load_document(path, FleetFile)
    nodes = tuple(_node(entry, file.defaults, path.parent) for entry in file.nodes)
    if not nodes:
        raise InputError(
            f"{path}: the fleet is empty", remedy="add nodes, or let `csdctl discover --cidr` find them"
        )
    names = [node.name for node in nodes]
    for name in names:
        if name == HOST_NAME or name.lower() == "localhost":
            raise InputError(f"{path}: a node may not be called {name!r}; that is the host")
        if names.count(name) > 1:
            raise InputError(
                f"{path}: two nodes are called {name!r}", remedy="give each node a name of its own"
            )
    return Fleet(nodes, Host(file.host.threads), file.network, file.emulated, path)


def _node(entry: NodeEntry, defaults: NodeDefaults, directory: Path) -> Node:
    def chosen(key: str) -> object:
        value = getattr(entry, key)
        return getattr(defaults, key) if value is None else value

    key = chosen("key")
    return Node(
        name=entry.name,
        address=entry.address,
        port=int(str(chosen("port"))),
        user=str(chosen("user")),
        key=(directory / Path(str(key)).expanduser()) if key else None,
        python=str(chosen("python")),
        group=str(chosen("group")),
        tags=tuple(entry.tags),
    )
