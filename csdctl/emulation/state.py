"""The specification, the files, the saved state, the fleet.yaml and the lock of an emulated fleet.

The id of a fleet is derived from its directory, so that a fleet without its state is still found: by the
marker in the environment of its processes and by the names of its control groups.

The fleet.yaml may be outside of the fleet's directory. Its first line names the writer, the fleet, and the
hash of the rest: a file that the user has changed is not removed.
"""

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from csdctl.documents import check_values, load_json, make_directory, save_json, save_text
from csdctl.errors import InputError
from csdctl.fleet.facts import facts_path
from csdctl.fleet.model import Fleet

MAX_NODES = 64
MIN_CPU = 0.01
"""Minimum share, in cores: below it a node takes seconds to respond."""
MIN_MEMORY_BYTES = 16 << 20

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class EmulatedSpec:
    """An emulated fleet: `cpu` in cores and `memory_bytes` apply to each node."""

    num_nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    cpu: Annotated[float, Field(ge=MIN_CPU, le=os.cpu_count() or 1)] = 0.25
    memory_bytes: Annotated[int, Field(ge=MIN_MEMORY_BYTES)] = 2 << 30


def check_spec(spec: EmulatedSpec) -> None:
    """Raise InputError for a fleet that this machine cannot emulate."""
    if spec.memory_bytes < MIN_MEMORY_BYTES:
        least = f"{MIN_MEMORY_BYTES >> 20}M"
        raise InputError(
            f"received {spec.memory_bytes:,} bytes as the memory of a node, expected at least {least}",
            remedy=f"for example --memory {least}; a node that trains needs about 1G",
        )
    cores = os.cpu_count() or 1
    if not MIN_CPU <= spec.cpu <= cores:
        raise InputError(
            f"received {spec.cpu:g} as the CPU share of a node, expected {MIN_CPU} to {cores} cores",
            remedy="for example --cpu 0.25",
        )
    check_values(asdict(spec), EmulatedSpec, "emulated fleet", remedy="choose a value of this range")


def parse_size(text: str) -> int:
    """Parse `2G`, `512M` or `1.5GiB` as bytes (K, M, G and T are powers of 1024); raises InputError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise InputError(
            f"received {text!r} as a size, expected a number and a unit such as 512M or 2G",
            remedy="for example --memory 2G",
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


SCHEMA = 1
USER = "csd"
"""The name that the nodes' servers are asked for; they take any."""


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
        """A link to the directory of the nodes' TMPDIRs."""
        self.short_tmp_prefix = f"csd-{self.fleet_id[:8]}-"
        """The name of that directory begins with this; the rest is random, so that nobody can take it."""
        self.known_hosts = self.directory / "known_hosts"

    @property
    def is_ours(self) -> bool:
        """Whether the directory was created for an emulated fleet."""
        return self.marker.exists() or self.state.exists()

    @property
    def is_foreign(self) -> bool:
        """Whether the directory has files, and was not created for an emulated fleet."""
        return self.directory.exists() and not self.is_ours and any(self.directory.iterdir())

    def node(self, name: str) -> "NodePaths":
        """Return the files of one node."""
        return NodePaths(self.directory / "nodes" / name)


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
    nodes: tuple[NodeState, ...] = ()
    owner: Owner | None = None
    """The fleet's owner; without one, the fleet stays up until `down`."""
    is_kept: bool = False
    """The fleet is down, and the files of its nodes are there for the next `up`."""

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


@contextlib.contextmanager
def locked(paths: FleetPaths) -> Iterator[None]:
    """Wait for the lock, and hold it."""
    make_directory(paths.directory.parent)
    handle = os.open(paths.directory.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


GROUP = "emulated"
NETWORK = "127.0.0.0/8"

_HEADER = re.compile(
    r"# Written by csdctl emulate up for fleet (\w+), content (\w+); `csdctl emulate down` removes it\.\n"
)


def save_fleet_file(paths: FleetPaths, state: FleetState, python: str) -> None:
    """Write the fleet.yaml of a running emulated fleet."""
    content = {
        "emulated": True,
        "network": NETWORK,
        "defaults": {"user": USER, "key": str(paths.key), "python": python, "group": GROUP},
        "nodes": [{"name": node.name, "address": "127.0.0.1", "port": node.port} for node in state.nodes],
    }
    body = yaml.safe_dump(content, sort_keys=False)
    header = (
        f"# Written by csdctl emulate up for fleet {state.fleet_id}, content {_hash(body)}; "
        "`csdctl emulate down` removes it.\n"
    )
    save_text(state.fleet_path, header + body)


def is_unchanged(path: Path, fleet_id: str) -> bool:
    """Return whether `path` is byte for byte what the emulator wrote for this fleet."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    header = _HEADER.match(text)
    return header is not None and header.groups() == (fleet_id, _hash(text[header.end() :]))


def check_may_write(path: Path, fleet_id: str) -> None:
    """Raise InputError when `path` exists and was not written by the emulator for this fleet."""
    if path.exists() and not is_unchanged(path, fleet_id):
        raise InputError(
            f"{path} exists and does not belong to this emulated fleet; it is left unchanged",
            remedy="use another file with --fleet, or move this one away",
        )


def remove_fleet_file(path: Path, fleet_id: str) -> bool:
    """Remove fleet.yaml and its facts; if the user has changed it, leave it and return False."""
    if not path.exists():
        return True
    if not is_unchanged(path, fleet_id):
        return False
    facts_path(Fleet(nodes=(), path=path)).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return True


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
