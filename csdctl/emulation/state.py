"""Where an emulated fleet keeps its files, and what it remembers of itself.

The id of a fleet follows from its directory, so that a fleet whose state is lost is still found: by
the mark in the environment of its processes and by the names of its control groups.
"""

import hashlib
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from csdctl.documents import load_json, save_json
from csdctl.emulation.spec import EmulatedSpec
from csdctl.errors import InputError

SCHEMA = 1


class FleetPaths:
    """Every file of an emulated fleet, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.fleet_id = hashlib.sha256(str(self.directory).encode()).hexdigest()[:12]
        self.mark = self.directory / "fleet.id"
        """Written first: says that the directory is an emulated fleet's, and may be removed."""
        self.state = self.directory / "state.json"
        self.key = self.directory / "id_ed25519"
        self.default_fleet = self.directory / "fleet.yaml"
        self.short_tmp = self.directory / "tmp"
        """A link to the short directory that holds the nodes' TMPDIRs, where one is needed."""
        self.usual_short_tmp = Path(tempfile.gettempdir(), f"csdctl-{self.fleet_id[:6]}")
        self.known_hosts = self.directory.parent / "known_hosts"

    @property
    def is_ours(self) -> bool:
        """Whether the directory was made for an emulated fleet."""
        return self.mark.exists() or self.state.exists()

    def node(self, name: str) -> "NodePaths":
        """The files of one node."""
        return NodePaths(self.directory / "nodes" / name)

    def nodes(self) -> list["NodePaths"]:
        """The files of every node there is a directory of."""
        return [NodePaths(path) for path in sorted((self.directory / "nodes").glob("*"))]


class NodePaths:
    """Every file of one node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.private = self.home / "private"
        self.tmp = directory / "tmp"
        self.host_key = directory / "host_key"
        self.public_host_key = directory / "host_key.pub"
        self.log = directory / "server.log"
        self.ready = directory / "node.json"
        """What the node's server writes once it listens: a NodeState."""


@dataclass(frozen=True)
class NodeState:
    """One server; `start_time` in clock ticks since boot, so that a recycled pid is not taken for it."""

    name: str
    pid: int
    start_time: int
    port: int
    cpu_mechanism: str


@dataclass(frozen=True)
class FleetState:
    """What `up` wrote. `nodes` is empty while the fleet is being started."""

    fleet_id: str
    spec: EmulatedSpec
    cpu_mechanism: str
    """What was asked for: auto, cgroup or duty."""
    fleet_path: Path
    user: str
    nodes: tuple[NodeState, ...] = ()

    @property
    def node_names(self) -> list[str]:
        """csd0, csd1, …"""
        return [f"csd{number}" for number in range(self.spec.num_nodes)]


def save_state(paths: FleetPaths, state: FleetState) -> None:
    """Write state.json, whole or not at all."""
    save_json(paths.state, {"schema": SCHEMA, **asdict(state), "fleet_path": str(state.fleet_path)})


def load_state(paths: FleetPaths) -> FleetState | None:
    """Read state.json; None when it is missing, cut short, or of another version."""
    try:
        content: dict[str, Any] = load_json(paths.state)
        if content.pop("schema") != SCHEMA:
            return None
        content["spec"] = EmulatedSpec(**content["spec"])
        content["nodes"] = tuple(NodeState(**node) for node in content["nodes"])
        return FleetState(**{**content, "fleet_path": Path(content["fleet_path"])})
    except (InputError, KeyError, TypeError, AttributeError):
        return None
