"""The fleet, as dataclasses that pydantic reads from fleet.yaml (`fleet_file`). Selection of its nodes."""

import fnmatch
import ipaddress
import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    PlainValidator,
    Strict,
    WithJsonSchema,
    model_validator,
    with_config,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from csdctl.documents import STRICT, Document
from csdctl.errors import CsdctlError, InputError, option
from csdctl.fleet.names import (
    ADDRESS,
    AN_ADDRESS,
    GROUP,
    NAME,
    USER,
    count_range,
    expand_range,
    format_node_names,
    names_by_value,
    range_ends,
)
from csdctl.worker.protocol.run_spec import AUTO, CPU, Device

HOST_NAME = "host"
SERVER_MARK = "/"
"""Between the name of a server and the name of one of its nodes: storage2/csd3."""
BETWEEN_SERVERS = "between servers"
"""The level of the links of all servers. Any other level is a server with its nodes."""
MAX_HOPS = 8
_HOP = re.compile(r"(?:(?P<user>[^@]*)@)?(?:\[(?P<v6>[^\]]*)\]|(?P<address>[^:]*))(?::(?P<port>\d{1,5}))?")
_ADDRESS_MARK = "\0"
"""Stands for the address of a node in messages that are compared."""

ValueT = TypeVar("ValueT")


def _refuse_key(_: object) -> object:
    raise PydanticCustomError("extra_forbidden", "unknown key")


NotInFile = Annotated[SkipJsonSchema[ValueT], BeforeValidator(_refuse_key)]
"""A field that is no key of fleet.yaml."""


def _matching(pattern: re.Pattern[str], what: str) -> AfterValidator:
    """Check that a value, or the first and last value of a range, matches `pattern`."""

    def check(value: str) -> str:
        try:
            ends = range_ends(value)
        except InputError as error:
            raise ValueError("; ".join(filter(None, [error.message, error.remedy]))) from None
        if not all(map(pattern.fullmatch, ends)):
            raise ValueError(f"not a valid {what}")
        return value

    return AfterValidator(check)


def parse_jump(text: object) -> "Node | None":
    """Parse a ProxyJump: hops of the form [user@]address[:port], joined by commas. Return the last hop.

    The user of a hop is '' and its port 0 where they are not stated. Raises ValueError.
    """
    if not isinstance(text, str):
        raise ValueError("must be text")
    if text in ("", "none"):
        return None
    parts = text.split(",")
    if len(parts) > MAX_HOPS:
        raise ValueError(f"more than {MAX_HOPS} jumps")
    hop: Node | None = None
    for part in parts:
        match = _HOP.fullmatch(part.strip().removeprefix("ssh://"))
        address = match and (match["v6"] or match["address"])
        if not match or not address or not ADDRESS.fullmatch(address):
            raise ValueError(f"not a valid jump host: expected [user@]address[:port], with an {AN_ADDRESS}")
        if match["user"] is not None and not USER.fullmatch(match["user"]):
            raise ValueError("not a valid user name of a jump host")
        if match["port"] and not 0 < int(match["port"]) < 1 << 16:
            raise ValueError(f"port {match['port']} of a jump host is not between 1 and 65535")
        name = name_hop(match["user"], address, match["port"])
        hop = Node(name, address, int(match["port"] or 0), match["user"] or "", jump=hop)
    return hop


def name_hop(*parts: str | None) -> str:
    """Return an alias for user, address and port: ops@10.0.0.1:2222 is ops-10.0.0.1-2222."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(filter(None, parts))).strip("-.")[:63]


def _read_key(path: Path) -> Path:
    try:
        if path.suffix == ".pub":
            raise ValueError(f"expected the private key, probably {path.with_suffix('').name}")
        return path.expanduser()
    except RuntimeError:
        raise ValueError("there is no home directory of this user") from None


def _check_python(value: str) -> str:
    if "/" in value and not value.startswith("/"):
        raise ValueError("expected the name of a program or an absolute path")
    return value


Network = Annotated[
    str, AfterValidator(lambda value: value and str(ipaddress.ip_network(value, strict=False)))
]
PrivateKey = Annotated[Path, AfterValidator(_read_key)]
Env = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
        Annotated[str, Field(pattern=r"^[^\x00]*$")],
    ],
    Field(max_length=100),
]
"""Variables of the environment of csdctl's programs on a machine, and their values."""
EnvPairs = Annotated[
    tuple[tuple[str, str], ...],
    GetPydanticSchema(
        lambda _, handler: core_schema.no_info_after_validator_function(
            lambda env: tuple(env.items()), handler.generate_schema(Env)
        )
    ),
]
"""The same as pairs of name and value, in a class whose values are hashable."""
Watts = Annotated[float, Field(ge=0, le=1_000_000)]


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
        """Take only a name for a source, a number for a constant, with or without its unit."""
        if isinstance(value, str):
            watts = re.fullmatch(r"([\d.]+) ?W", value)
            value = {"source": "constant", "watts": watts[1]} if watts else {"source": value}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            value = {"source": "constant", "watts": value}
        if isinstance(value, dict) and (source := value.get("source")) in ("ipmi", "hwmon", "csv"):
            instead = "write `source: command`, with a `command` from docs/how-to/energy.md"
            raise ValueError(f"source {source} no longer exists: {instead}")
        return value

    @model_validator(mode="after")
    def _has_what_its_source_needs(self) -> Self:
        for key, source in {"watts": "constant", "command": "command"}.items():
            if (getattr(self, key) not in ("", None)) != (self.source == source):
                raise ValueError(f"source {source} needs `{key}`, and no other source uses it")
        if self.on_host and not self.command:
            raise ValueError("only source command uses `on_host`")
        return self


@with_config(STRICT)
@dataclass(frozen=True)
class Node:
    """A machine that is reached over SSH and trains, or a jump host.

    An entry of fleet.yaml may stand for several: `name` and `address` then have ranges (csd[0-35]).
    """

    name: Annotated[str, _matching(NAME, "name (letters, digits, '.', '_', '-')")]
    address: Annotated[str, _matching(ADDRESS, AN_ADDRESS)]
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    user: Annotated[str, _matching(USER, "user name")] = "root"
    key: PrivateKey | None = None
    """In fleet.yaml also a list, whose other entries are `other_keys`."""
    python: Annotated[str, Field(pattern=r"^[^\x00-\x1f-][^\x00-\x1f]*$"), AfterValidator(_check_python)] = (
        "python3"
    )
    groups: Annotated[
        tuple[Annotated[str, _matching(GROUP, "group (no spaces, commas or brackets)")], ...],
        Field(validation_alias="group"),
        BeforeValidator(lambda value: ([value] if value else []) if isinstance(value, str) else value),
        AfterValidator(lambda groups: tuple(dict.fromkeys(groups))),
    ] = ()
    jump: Annotated["Node | None", PlainValidator(parse_jump), WithJsonSchema({"type": "string"})] = None
    """The jump host of the connection, which may have a jump host itself."""
    power: PowerSource | None = None
    server: NotInFile[str] = ""
    """The server that it belongs to: for a server its own name; '' for the machine that csdctl runs on."""
    device: Device = AUTO
    env: EnvPairs = ()
    """Variables of the environment of csdctl's programs there, and their values."""
    state: Annotated[str, Field(pattern=r"^(/[^\x00-\x1f]*)?$")] = ""
    """The directory with csdctl's state on the machine; '' for ~/.csdctl."""
    other_keys: Annotated[SkipJsonSchema[tuple[PrivateKey, ...]], Strict()] = ()
    offers_agent: bool = False
    """Whether, beside `key` and `other_keys`, the agent's are offered: ssh without IdentitiesOnly."""

    @model_validator(mode="before")
    @classmethod
    def _divide_keys(cls, content: Any) -> Any:
        """Divide a list of keys. Lists come from the file, and a file has no tuple for `other_keys`."""
        if isinstance(content, dict) and isinstance(keys := content.get("key"), list | str):
            keys = keys if isinstance(keys, list) else list(filter(None, [keys]))
            return content | {"key": next(iter(keys), None), "other_keys": tuple(keys[1:])}
        return content

    @model_validator(mode="after")
    def _has_equal_ranges(self) -> Self:
        num_names, num_addresses = count_range(self.name), count_range(self.address)
        if num_names != num_addresses:
            names = f"name {self.name!r} expands to {num_names} nodes"
            addresses = f"address {self.address!r} to {num_addresses}"
            raise ValueError(f"{names}, but {addresses}; expected equal numbers")
        return self

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


@with_config(STRICT)
@dataclass(frozen=True)
class Server(Node):
    """A server with its own nodes. They are in `nodes` only in fleet.yaml."""

    network: Network = ""
    """The network of its tunnel, as CIDR. '' lets MPI choose."""
    nodes: tuple[Node, ...] = ()


class Host(Document):
    """The machine that csdctl runs on, as a rank. `threads` 0 means all cores."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    trains: bool = True
    """False: it only sums gradients, evaluates, and serves data to the nodes."""
    power: PowerSource | None = None
    device: Device = AUTO
    env: Env = {}


@dataclass(frozen=True)
class Level:
    """Machines that one mpirun connects, on the first of them: a server and its nodes, or all servers."""

    name: str
    """The server of a tunnel, or BETWEEN_SERVERS."""
    machines: tuple[str, ...]
    network: str


@with_config(STRICT)
@dataclass(frozen=True)
class Fleet:
    """The host and its nodes, as fleet.yaml states them."""

    nodes: tuple[Node, ...] = ()
    host: Host = field(default_factory=Host)
    network: Network = ""
    """The network, as CIDR, that MPI uses between the machines; '' lets MPI choose."""
    emulated: bool = False
    path: NotInFile[Path] = Path("fleet.yaml")
    between: NotInFile[str] = ""
    """The network that MPI uses between the servers; '' lets MPI choose."""
    here: NotInFile[str] = ""
    """The server on which csdctl runs; '' for a single server, or a machine beside the servers."""
    here_state: NotInFile[str] = ""

    @property
    def networks(self) -> tuple[tuple[str, str], ...]:
        """Of every other server, its name and the network of its tunnel. It is '' if MPI chooses."""
        machines = [machine for node in self.nodes for machine in (node, node.jump)]
        servers = [machine for machine in machines if isinstance(machine, Server)]
        return tuple({server.name: server.network for server in servers}.items())

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
        tunnel = dict(self.networks).get(server, self.network)
        return tuple(filter(None, [tunnel, self.between if machine == server else ""]))

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
    selected: Iterable[str] = groups
    for name_of_option, patterns in (("limit", limit), ("exclude", exclude)):
        matches = {
            name
            for pattern in ",".join(patterns).split(",")
            if pattern.strip()
            for name in _match(groups, pattern.strip(), name_of_option, where)
        }
        if patterns:
            selected = [name for name in selected if (name in matches) == (name_of_option == "limit")]
    if not selected and not may_be_empty:
        raise InputError(
            f"{option('limit')} and {option('exclude')} leave no node of {where}",
            remedy="select at least one node",
        )
    return [*selected]


def keep_nodes(fleet: Fleet, names: Container[str]) -> Fleet:
    """Return the fleet with only the nodes in `names`. Possibly without nodes."""
    return replace(fleet, nodes=tuple(node for node in fleet.nodes if node.name in names))


def _match(groups: Mapping[str, Sequence[str]], pattern: str, name_of_option: str, where: str) -> list[str]:
    """Return the names that `pattern` selects. Raises InputError for none, or a range with missing names."""
    expanded = expand_range(pattern)
    literal = {name for name in expanded if not re.search(r"[*?\[]", name)}
    wildcards = [re.compile(fnmatch.translate(name)) for name in expanded if name not in literal]
    all_names = set(groups).union(*groups.values())
    missing = [name for name in literal if name not in all_names]
    if wildcards or name_of_option != "limit" or len(missing) == len(literal):
        missing = []  # a wildcard, a group, no match at all, or nodes that are to be left out anyway
    matches = [
        name
        for name, groups_of_name in groups.items()
        if not literal.isdisjoint((name, *groups_of_name)) or any(card.match(name) for card in wildcards)
    ]
    if pattern == "all" and not matches:
        return [*groups]
    if not matches or missing:
        group_names = sorted(all_names.difference(groups, ["all"]))
        absent = f"names {format_node_names(sorted(missing))}, not in" if missing else "matches no node of"
        raise InputError(
            f"{option(name_of_option)} {pattern!r} {absent} {where}",
            remedy=f"nodes: {format_node_names(groups)}; groups: {format_node_names(['all', *group_names])}",
        )
    return matches


@dataclass(frozen=True)
class Problem:
    """A problem that occurred on all machines in `names`."""

    names: tuple[str, ...]
    message: str
    remedy: str


def fold_problems(failed: Mapping[str, CsdctlError], fleet: Fleet) -> list[Problem]:
    """Group the errors of `failed`. Messages that differ only in the node's address are one problem."""
    addresses = {node.name: node.address for node in fleet.nodes}
    templates = {
        name: error.message.replace(addresses.get(name) or _ADDRESS_MARK, _ADDRESS_MARK)
        for name, error in failed.items()
    }
    problems = []
    kinds = names_by_value((name, (type(failed[name]), template)) for name, template in templates.items())
    for (_, template), names in kinds.items():
        remedy = failed[names[0]].remedy
        if len({failed[name].remedy for name in names}) > 1:
            remedy += f" (shown for {names[0]})"
        ranges = format_node_names(addresses.get(name, "") for name in names)
        problems.append(Problem(tuple(names), template.replace(_ADDRESS_MARK, ranges), remedy))
    return problems
