"""The fleet as frozen dataclasses, which `fleet_file` creates from fleet.yaml. Selection of its nodes."""

import fnmatch
import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from csdctl.documents import Document
from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.names import expand_range, format_node_names
from csdctl.worker.protocol.run_spec import AUTO, CPU, Device

HOST_NAME = "host"
SERVER_MARK = "/"
"""Between the name of a server and that of one of its nodes: storage2/csd3."""

Env = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
        Annotated[str, Field(pattern=r"^[^\x00]*$")],
    ],
    Field(max_length=100),
]
"""Variables of the environment of csdctl's programs on a machine, and their values."""
Watts = Annotated[float, Field(ge=0, le=1_000_000)]
BETWEEN_SERVERS = "between servers"
_ADDRESS = "\0"


class PowerSource(Document):
    """The source of the power of one machine. Watts of the whole machine, or of the part that it covers."""

    source: Literal["rapl", "constant", "command"]
    watts: Watts | None = None
    command: Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=2000)] = ""
    on_host: bool = False
    idle_watts: Watts | None = None
    """Power of the machine when nothing is trained, as stated by the user."""
    includes_nodes: bool = False
    """Whether the reading of the host has the power of the nodes in its chassis."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        """Take a name alone for a source, a number for a constant, with or without its unit."""
        if isinstance(value, str):
            watts = re.fullmatch(r"([\d.]+) ?W", value)
            value = {"source": "constant", "watts": watts[1]} if watts else {"source": value}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            value = {"source": "constant", "watts": value}
        if isinstance(value, dict) and value.get("source") in ("ipmi", "hwmon", "csv"):
            instead = "write `source: command`, with a `command` from docs/how-to/energy.md"
            raise ValueError(f"source {value['source']} no longer exists: {instead}")
        return value

    @model_validator(mode="after")
    def _has_what_its_source_needs(self) -> Self:
        for key, source in {"watts": "constant", "command": "command"}.items():
            if (getattr(self, key) not in ("", None)) != (self.source == source):
                raise ValueError(f"source {source} needs `{key}`, and no other source uses it")
        if self.on_host and not self.command:
            raise ValueError("only source command uses `on_host`")
        return self


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
    server: str = ""
    """The server that it belongs to: for a server its own name; '' for the machine that csdctl runs on."""
    device: str = AUTO
    env: tuple[tuple[str, str], ...] = ()
    """Variables of the environment of csdctl's programs there, and their values."""
    state: str = ""
    """The directory with csdctl's state on the machine; '' for ~/.csdctl."""
    other_keys: tuple[Path, ...] = ()
    offers_agent: bool = False
    """Whether, beside `key` and `other_keys`, the agent's are offered: ssh without IdentitiesOnly."""

    @property
    def keys(self) -> tuple[Path, ...]:
        """The keys that the fleet file states, in their order."""
        return (self.key, *self.other_keys) if self.key else ()

    @property
    def key_address(self) -> str:
        """The address under which its host key is known. Its name where other servers use its address too."""
        return self.name if SERVER_MARK in self.name else self.address

    @property
    def endpoint(self) -> str:
        """Where its SSH server is: equal for two nodes that are one machine."""
        return f"{self.address.lower()} port {self.port}" + (f" behind {self.jump.name}" if self.jump else "")

    @property
    def jumps(self) -> "tuple[Node, ...]":
        """The jump hosts of the connection, the last one first."""
        return (self.jump, *self.jump.jumps) if self.jump else ()


class Host(Document):
    """The machine that csdctl runs on, as a rank. `threads` 0 means all cores."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    trains: bool = True
    """False: it only sums gradients, evaluates, and serves data to the nodes."""
    power: PowerSource | None = None
    device: Device = AUTO
    env: Env = {}


"""The level of the links of all servers; any other level is that of a server with its nodes."""


@dataclass(frozen=True)
class Level:
    """Machines that one mpirun connects, on the first of them: a server and its nodes, or all servers."""

    name: str
    """The server of a tunnel, or BETWEEN_SERVERS."""
    machines: tuple[str, ...]
    network: str


@dataclass(frozen=True)
class Fleet:
    """The host and its nodes, as written in fleet.yaml."""

    nodes: tuple[Node, ...]
    host: Host = field(default_factory=Host)
    network: str = ""
    """The network, as CIDR, that MPI uses between the machines; '' lets MPI choose."""
    emulated: bool = False
    path: Path = Path("fleet.yaml")
    networks: tuple[tuple[str, str], ...] = ()
    """Of every other server, its name and the network of its tunnel; '' if MPI chooses."""
    between: str = ""
    """The network that MPI uses between the servers; '' lets MPI choose."""
    here: str = ""
    """The server on which csdctl runs; '' for one server alone, or a machine beside the servers."""
    here_state: str = ""

    @property
    def machines(self) -> tuple[str, ...]:
        """The names of the host and all nodes, the host first."""
        return (HOST_NAME, *(node.name for node in self.nodes))

    @property
    def names_without_servers(self) -> tuple[str, ...]:
        """The names of the nodes that are no servers."""
        return tuple(node.name for node in self.nodes if node.server != node.name)

    def networks_of(self, machine: str) -> tuple[str, ...]:
        """Return the networks in which MPI reaches `machine`, as far as the file states them."""
        server = self.server_of(machine)
        own = dict(self.networks).get(server, self.network)
        return tuple(filter(None, [own, self.between if machine == server else ""]))

    def server_of(self, machine: str) -> str:
        """Return the server that `machine` belongs to, or is. HOST_NAME for the one that csdctl runs on."""
        return HOST_NAME if machine == HOST_NAME else self.node(machine).server or HOST_NAME

    def levels(self, machines: Iterable[str]) -> tuple[Level, ...]:
        """Return what mpirun connects for `machines`, in the order of the fleet: tunnels, then the servers.

        A node without its server among them reaches nobody, and is in no level.
        """
        present, networks = set(machines), {HOST_NAME: self.network, **dict(self.networks)}
        servers = {server: [server] for server in networks if server in present}
        for node in self.nodes:
            server = node.server or HOST_NAME
            if node.name in present and node.name != server and server in servers:
                servers[server].append(node.name)
        several = {server: tuple(members) for server, members in servers.items() if len(members) > 1}
        tunnels = [Level(server, members, networks[server]) for server, members in several.items()]
        between = [Level(BETWEEN_SERVERS, tuple(servers), self.between)] if len(servers) > 1 else []
        return (*tunnels, *between)

    def power_of(self, machine: str) -> PowerSource | None:
        """Return how the power of `machine` is known."""
        return self.host.power if machine == HOST_NAME else self.node(machine).power

    def device_of(self, machine: str) -> str:
        """Return the `device` of `machine`. Emulated machines share one GPU, and use none."""
        stated = self.host.device if machine == HOST_NAME else self.node(machine).device
        return CPU if self.emulated else stated

    def python_of(self, machine: str) -> str:
        """Return the Python that runs the worker on `machine`."""
        return sys.executable if machine == HOST_NAME else self.node(machine).python

    def node(self, name: str) -> Node:
        """Return node `name`. Raises InputError if it does not exist."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InputError(f"fleet {self.path} has no node {name!r}")


def select_nodes(
    fleet: Fleet,
    limit: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    may_be_empty: bool = False,
    with_servers: bool = True,
) -> Fleet:
    """Return the fleet with the nodes that match `limit` (all when empty) and not `exclude`.

    A pattern is a name with wildcards or a range (`csd[0-7]`), a group, `all`, or a jump host, for the nodes
    behind it. Several may be joined by commas. Raises InputError for a pattern without a match, or when no
    node remains. `may_be_empty`: the host alone is enough. `with_servers`: a node is selected with its
    server, and excluded with it.
    """
    names, where = {node.name for node in fleet.nodes}, str(fleet.path)
    jumps = {node.name: {jump.name for jump in node.jumps} - names for node in fleet.nodes}
    groups = {node.name: (*node.groups, *jumps[node.name]) for node in fleet.nodes}
    if with_servers:
        present = select_names(groups, (), exclude, where=where, may_be_empty=True)
        servers = {node.server for node in fleet.nodes} & groups.keys()
        exclude = [*exclude, *sorted(servers.difference(present))]
    kept = set(select_names(groups, limit, exclude, where=where, may_be_empty=may_be_empty))
    if with_servers:
        kept |= {node.server for node in fleet.nodes if node.name in kept}
    return keep_nodes(fleet, kept)


def select_names(
    groups: Mapping[str, Sequence[str]],
    limit: Sequence[str],
    exclude: Sequence[str],
    *,
    where: str,
    may_be_empty: bool = False,
) -> list[str]:
    """Select names as `select_nodes` does, given the groups of each name. `where` names their file."""
    kept: Iterable[str] = groups
    if limit:
        wanted = {name for pattern in _split(limit) for name in _matching(groups, pattern, "--limit", where)}
        kept = [name for name in kept if name in wanted]
    unwanted = {name for one in _split(exclude) for name in _matching(groups, one, "--exclude", where)}
    kept = [name for name in kept if name not in unwanted]
    if not kept and not may_be_empty:
        raise InputError(f"--limit and --exclude leave no node of {where}", remedy="select at least one node")
    return kept


def keep_nodes(fleet: Fleet, names: Container[str]) -> Fleet:
    """Return the fleet with only the nodes in `names`. Possibly without nodes."""
    nodes = tuple(node for node in fleet.nodes if node.name in names)
    servers = {node.server for node in nodes}
    return replace(fleet, nodes=nodes, networks=tuple(one for one in fleet.networks if one[0] in servers))


def _split(patterns: Sequence[str]) -> list[str]:
    return [pattern.strip() for joined in patterns for pattern in joined.split(",") if pattern.strip()]


def _matching(groups: Mapping[str, Sequence[str]], pattern: str, option: str, where: str) -> list[str]:
    expanded = expand_range(pattern)
    wanted = {name for name in expanded if not re.search(r"[*?\[]", name)}
    patterns = [re.compile(fnmatch.translate(name)) for name in expanded if name not in wanted]
    known = set(groups).union(*groups.values())
    missing = [name for name in wanted if name not in known]
    if patterns or option != "--limit" or len(missing) == len(wanted):
        missing = []  # a wildcard, a group, no match at all, or nodes that are to be left out anyway
    found = [
        name
        for name, own in groups.items()
        if name in wanted or not wanted.isdisjoint(own) or any(each.match(name) for each in patterns)
    ]
    if pattern == "all" and not found:
        return [*groups]
    if not found or missing:
        others = sorted(known.difference(groups, ["all"]))
        absent = f"names {format_node_names(sorted(missing))}, not in" if missing else "matches no node of"
        raise InputError(
            f"{option} {pattern!r} {absent} {where}",
            remedy=f"nodes: {format_node_names(groups)}; groups: {format_node_names(['all', *others])}",
        )
    return found


@dataclass(frozen=True)
class Problem:
    """A problem that occurred on all machines in `names`."""

    names: tuple[str, ...]
    message: str
    remedy: str


def fold_problems(failed: Mapping[str, CsdctlError], fleet: Fleet) -> list[Problem]:
    """Group the errors of `failed`. Messages that differ only in the node's address are one problem."""
    addresses = {node.name: node.address for node in fleet.nodes}
    grouped: dict[tuple[type, str], list[str]] = defaultdict(list)
    for name, error in failed.items():
        address = addresses.get(name)
        template = error.message.replace(address, _ADDRESS) if address else error.message
        grouped[type(error), template].append(name)
    problems = []
    for (_, template), names in grouped.items():
        remedy = failed[names[0]].remedy
        if len({failed[name].remedy for name in names}) > 1:
            remedy += f" (shown for {names[0]})"
        shown = format_node_names(addresses.get(name, "") for name in names)
        problems.append(Problem(tuple(names), template.replace(_ADDRESS, shown), remedy))
    return problems
