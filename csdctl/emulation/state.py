"""The files and the saved state of an emulated fleet.

The id of a fleet is derived from its directory, so that a fleet without its state is still found: by the
marker in the environment of its processes and by the names of its control groups.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from csdctl.documents import check_values, load_json, save_json
from csdctl.emulation.spec import EmulatedSpec
from csdctl.errors import InputError

SCHEMA = 1


class FleetPaths:
    """The path of every file of an emulated fleet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.fleet_id = hashlib.sha256(str(self.directory).encode()).hexdigest()[:12]
        self.marker = self.directory / "fleet.id"
        """Written first: marks the directory as that of an emulated fleet, which may be removed."""
        self.state = self.directory / "state.json"
        self.key = self.directory / "id_ed25519"
        self.default_fleet = self.directory / "fleet.yaml"
        self.short_tmp = self.directory / "tmp"
        """A link to the short directory for the nodes' TMPDIRs, if one is needed."""
        self.short_tmp_prefix = f"csd-{self.fleet_id[:8]}-"
        """The name of that directory begins with this; the rest is random, so that nobody can take it."""
        self.known_hosts = self.directory.parent / "known_hosts"

    @property
    def is_ours(self) -> bool:
        """Whether the directory was created for an emulated fleet."""
        return self.marker.exists() or self.state.exists()

    def node(self, name: str) -> "NodePaths":
        """Return the files of one node."""
        return NodePaths(self.directory / "nodes" / name)

    def nodes(self) -> list["NodePaths"]:
        """Return the files of every node that has a directory."""
        return [NodePaths(path) for path in sorted((self.directory / "nodes").glob("*"))]


class NodePaths:
    """The path of every file of one node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.private = self.home / "private"
        self.tmp = directory / "tmp"
        self.host_key = directory / "host_key"
        self.public_host_key = directory / "host_key.pub"
        self.log = directory / "server.log"
        self.ready = directory / "node.json"
        """Written by the node's server once it listens: a NodeState."""


@dataclass(frozen=True)
class NodeState:
    """One server; `start_time` in clock ticks since boot detects a reused pid."""

    name: str
    pid: int
    start_time: int
    port: int
    cpu_mechanism: str


@dataclass(frozen=True)
class Owner:
    """The process that the fleet ends with; `start_time` as that of a server."""

    pid: int
    start_time: int


@dataclass(frozen=True)
class FleetState:
    """The state that `up` saves. `nodes` is empty while the fleet starts."""

    fleet_id: str
    spec: EmulatedSpec
    cpu_mechanism: str
    """The requested mechanism: auto, cgroup or duty."""
    fleet_path: Path
    user: str
    nodes: tuple[NodeState, ...] = ()
    owner: Owner | None = None
    """Without one, the fleet stays up until `down`."""

    @property
    def node_names(self) -> list[str]:
        """csd0, csd1, …"""
        return [f"csd{number}" for number in range(self.spec.num_nodes)]


def save_state(paths: FleetPaths, state: FleetState) -> None:
    """Write state.json atomically."""
    save_json(paths.state, {"schema": SCHEMA, **asdict(state), "fleet_path": str(state.fleet_path)})


def load_state(paths: FleetPaths) -> FleetState | None:
    """Read state.json; return None when it is missing, truncated, or of another version."""
    try:
        content: dict[str, Any] = load_json(paths.state)
        if content.pop("schema") != SCHEMA:
            return None
        return check_values(content, FleetState, str(paths.state))
    except (InputError, KeyError, TypeError, AttributeError):
        return None
