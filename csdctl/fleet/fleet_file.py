"""fleet.yaml: its models, reading and writing.

`load_fleet` is the only way to load a Fleet from a file. An entry with ranges expands to many nodes.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from csdctl.documents import Document, load_document
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, Host, Node, PowerSource
from csdctl.fleet.names import (
    ADDRESS,
    GROUP,
    MAX_RANGE,
    NAME,
    USER,
    count_range,
    expand_range,
    fold_ordered,
    range_ends,
)
from csdctl.fleet.network import find_ambiguous, means_host, own_names
from csdctl.fleet.openssh import MAX_HOPS, NO_JUMP, Hop, parse_jump

SourceName = Literal["rapl", "ipmi", "redfish", "hwmon", "csv", "constant"]
Watts = Annotated[float, Field(ge=0, le=1_000_000)]
OneLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f]*$", max_length=500)]
NEEDED = {"redfish": "url", "hwmon": "path", "csv": "path", "constant": "watts"}
"""The key that a source cannot do without."""
ALLOWED = {
    "redfish": {"url", "credentials", "certificate"},
    "hwmon": {"path"},
    "csv": {"path"},
    "constant": {"watts"},
}


class PowerEntry(Document):
    """`power` in fleet.yaml: a source with its settings. A name alone is a source, a number a constant."""

    source: SourceName
    path: OneLine = ""
    url: Annotated[str, Field(pattern=r"^(https?://[^\s\x00-\x1f]+)?$", max_length=500)] = ""
    credentials: Path | None = None
    certificate: Path | None = None
    watts: Watts | None = None
    idle_watts: Watts | None = None
    includes_nodes: bool = False

    @model_validator(mode="after")
    def _has_what_its_source_needs(self) -> Self:
        needed = NEEDED.get(self.source, "")
        if needed and getattr(self, needed) in ("", None):
            raise ValueError(f"source {self.source} needs `{needed}`")
        given = {key for key in ("path", "url", "credentials", "certificate", "watts") if getattr(self, key)}
        if others := sorted(given - ALLOWED.get(self.source, set())):
            raise ValueError(f"source {self.source} does not use `{others[0]}`")
        return self

    def resolve(self, directory: Path) -> PowerSource:
        """Return the source; paths of files on the host are relative to `directory`, that of fleet.yaml."""
        values: dict[str, Any] = self.model_dump()
        for key in ("credentials", "certificate"):
            if values[key] is not None:
                values[key] = directory / values[key]
        if self.source == "csv":
            values["path"] = str(directory / self.path)
        return PowerSource(**values)


def _expand(value: object) -> object:
    if isinstance(value, str):
        return {"source": value}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"source": "constant", "watts": value}
    return value


Power = Annotated[PowerEntry, BeforeValidator(_expand)]


def render_power(power: PowerSource) -> object:
    """Return `power` as fleet.yaml has it."""
    content = {key: value for key, value in vars(power).items() if value not in ("", None, False)}
    content |= {key: str(value) for key, value in content.items() if isinstance(value, Path)}
    return power.source if content == {"source": power.source} else content


def _matching(pattern: re.Pattern[str], what: str, *, ranges: bool = False) -> AfterValidator:
    def check(value: str) -> str:
        for item in _ends(value) if ranges else [value]:
            if not pattern.fullmatch(item):
                raise ValueError(f"not a valid {what}")
        return value

    return AfterValidator(check)


def _ends(value: str) -> tuple[str, str]:
    try:
        return range_ends(value)
    except InputError as error:
        raise ValueError("; ".join(part for part in (error.message, error.remedy) if part)) from None


_A_NAME = "name (letters, digits, '.', '_', '-')"
Name = Annotated[str, _matching(NAME, _A_NAME)]
Names = Annotated[str, _matching(NAME, _A_NAME, ranges=True)]
Address = Annotated[str, _matching(ADDRESS, "address or host name")]
Addresses = Annotated[str, _matching(ADDRESS, "address or host name", ranges=True)]
User = Annotated[str, _matching(USER, "user name")]
Port = Annotated[int, Field(ge=1, le=65535)]
GroupName = Annotated[str, _matching(GROUP, "group (no spaces, commas or brackets)")]
Groups = Annotated[
    list[GroupName],
    BeforeValidator(lambda value: ([value] if value else []) if isinstance(value, str) else value),
]


def _check_jump(value: str) -> str:
    parse_jump(value)
    return value


Jump = Annotated[str, AfterValidator(_check_jump)]


def _as_network(value: str) -> str:
    return str(ipaddress.ip_network(value, strict=False)) if value else value


Network = Annotated[str, AfterValidator(_as_network)]
Python = Annotated[str, Field(pattern=r"^[^\x00-\x1f-][^\x00-\x1f]*$")]


def _as_key(value: Path) -> Path:
    try:
        return value.expanduser()
    except RuntimeError:
        raise ValueError("there is no home directory of this user") from None


Key = Annotated[Path, AfterValidator(_as_key)]


class NodeDefaults(Document):
    """Default settings of all nodes."""

    port: Port = 22
    user: User = "root"
    key: Key | None = None
    python: Python = "python3"
    group: Groups = []
    jump: Jump = ""
    power: Power | None = None


class NodeEntry(Document):
    """An entry of `nodes` in fleet.yaml; `csd[0-35]` with as many addresses is a range of nodes."""

    name: Names
    address: Addresses
    port: Port | None = None
    user: User | None = None
    key: Key | None = None
    python: Python | None = None
    group: Groups | None = None
    jump: Jump | None = None
    power: Power | None = None

    @model_validator(mode="after")
    def _have_equal_lengths(self) -> Self:
        num_names, num_addresses = count_range(self.name), count_range(self.address)
        if num_names != num_addresses:
            raise ValueError(
                f"name {self.name!r} expands to {num_names} nodes, but address {self.address!r} "
                f"to {num_addresses}; expected equal numbers"
            )
        return self


class JumpHostEntry(Document):
    """A jump host that does not train."""

    name: Name
    address: Address
    port: Port = 22
    user: User | None = None
    key: Key | None = None
    jump: Jump = ""


class HostEntry(Document):
    """The `host` section of fleet.yaml."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    power: Power | None = None


class FleetFile(Document):
    """The content of fleet.yaml."""

    host: HostEntry = HostEntry()
    network: Network = ""
    emulated: bool = False
    defaults: NodeDefaults = NodeDefaults()
    jump_hosts: list[JumpHostEntry] = []
    nodes: list[NodeEntry]

    @model_validator(mode="after")
    def _has_not_too_many_nodes(self) -> Self:
        num_nodes = sum(count_range(entry.name) for entry in self.nodes)
        if num_nodes > MAX_RANGE:
            raise ValueError(f"the entries expand to {num_nodes:,} nodes, expected at most {MAX_RANGE:,}")
        return self


def load_fleet(path: Path) -> Fleet:
    """Read fleet.yaml; raises InputError for invalid content, no nodes, duplicate names or cyclic jumps."""
    file = load_document(path, FleetFile)
    if not file.nodes:
        raise InputError(
            f"{path}: the fleet is empty", remedy="add nodes, or find them with `csdctl discover --cidr`"
        )
    machines = {entry.name: _jump_host(entry, file.defaults, path.parent) for entry in file.jump_hosts}
    nodes = [_nodes(entry, file.defaults, path.parent) for entry in file.nodes]
    flat = [(node, jump) for entry, jump in nodes for node in entry]
    _check_names(path, [entry.name for entry in file.jump_hosts], [node.name for node, _ in flat])
    machines |= {node.name: (node, jump) for node, jump in flat}
    resolver = _Jumps(machines, user=file.defaults.user, key=_key(None, file.defaults, path.parent))
    try:
        resolved = tuple(resolver.resolve(node, jump) for node, jump in flat)
    except ValueError as error:
        raise InputError(f"{path}: {error}", remedy=f"fix `jump` in {path}") from None
    power = file.host.power.resolve(path.parent) if file.host.power else None
    return Fleet(resolved, Host(file.host.threads, power), file.network, file.emulated, path)


def _nodes(entry: NodeEntry, defaults: NodeDefaults, directory: Path) -> tuple[list[Node], str]:
    """Return the nodes of `entry` without their jump hosts, and the value of its `jump`."""
    groups = tuple(dict.fromkeys(defaults.group if entry.group is None else entry.group))
    power = entry.power or defaults.power
    nodes = [
        Node(
            name=name,
            address=address,
            port=entry.port or defaults.port,
            user=entry.user or defaults.user,
            key=_key(entry.key, defaults, directory),
            python=entry.python or defaults.python,
            groups=groups,
            power=power.resolve(directory) if power else None,
        )
        for name, address in zip(expand_range(entry.name), expand_range(entry.address), strict=True)
    ]
    return nodes, defaults.jump if entry.jump is None else entry.jump


def _jump_host(entry: JumpHostEntry, defaults: NodeDefaults, directory: Path) -> tuple[Node, str]:
    key = _key(entry.key, defaults, directory)
    user = entry.user or defaults.user
    return Node(name=entry.name, address=entry.address, port=entry.port, user=user, key=key), entry.jump


def _key(key: Path | None, defaults: NodeDefaults, directory: Path) -> Path | None:
    chosen = key or defaults.key
    return directory / chosen if chosen else None


def _check_names(path: Path, jump_hosts: Sequence[str], nodes: Sequence[str]) -> None:
    own = own_names()
    for name, count in Counter([*jump_hosts, *nodes]).items():
        if means_host(name, own):
            raise InputError(
                f"{path}: {name!r} is not allowed as a node name: csdctl or mpirun would take it for this "
                f"host, which is {', '.join(sorted(own))}",
                remedy="give the node another `name`; its `address` may stay",
            )
        if count > 1:
            raise InputError(
                f"{path}: two nodes have the name {name!r}", remedy="give each node a unique name"
            )
    for first, other in find_ambiguous(nodes):
        raise InputError(
            f"{path}: mpirun would take {first!r} and {other!r} for one node: it reads names up to the dot",
            remedy=f"write {other.replace('.', '-')!r}, for example",
        )


@dataclass
class _Jumps:
    """Resolves the chains of jump hosts of nodes.

    `machines` are the possible jump hosts by name, each with the value of its own `jump`; `user` and `key`
    are for jump hosts given as an address.
    """

    machines: Mapping[str, tuple[Node, str]]
    user: str
    key: Path | None = None
    _found: dict[str, Node | None] = field(default_factory=dict)

    def resolve(self, node: Node, jump: str) -> Node:
        """Return `node` with the chain of `jump`; raises ValueError for a cycle or a long chain."""
        resolved = replace(node, jump=self._chain(jump, (node.name,)))
        hop, num_hops = resolved.jump, 0
        while hop:
            hop, num_hops = hop.jump, num_hops + 1
        if num_hops > MAX_HOPS:
            raise ValueError(f"{node.name} is behind more than {MAX_HOPS} jump hosts")
        return resolved

    def _chain(self, jump: str, passed: tuple[str, ...]) -> Node | None:
        if jump not in self._found:
            self._found[jump] = self._follow(jump, passed)
        return self._found[jump]

    def _follow(self, jump: str, passed: tuple[str, ...]) -> Node | None:
        if len(passed) > MAX_HOPS:
            raise ValueError(f"{passed[0]} is behind more than {MAX_HOPS} jump hosts")
        before: Node | None = None
        for number, hop in enumerate(parse_jump(jump)):
            if hop.name in passed:
                raise ValueError(f"cyclic jumps: {' → '.join([*passed, hop.name])}")
            found = self.machines.get(hop.address) if hop.user is None and hop.port is None else None
            node, own = found or (self._direct(hop), "")
            # As with ssh -J, only the first hop of a chain uses its own `jump`.
            before = replace(node, jump=before if number else self._chain(own, (*passed, hop.name)))
        return before

    def _direct(self, hop: Hop) -> Node:
        user = self.user if hop.user is None else hop.user
        return Node(name=hop.name, address=hop.address, port=hop.port or 22, user=user, key=self.key)


YamlMapping = dict[str, object]


def render_fleet(fleet: Fleet, *, origin: str) -> str:
    """Return fleet.yaml for `fleet`; `origin` is written to its first line.

    Raises InputError for a fleet without nodes.
    """
    if not fleet.nodes:
        raise InputError("a fleet needs at least one node")
    jumps = _JumpNames(fleet.nodes)
    machines = [*fleet.nodes, *jumps.hosts]
    defaults = _defaults(fleet.nodes, machines, jumps)
    content: YamlMapping = {}
    host: YamlMapping = {"threads": fleet.host.threads} if fleet.host.threads else {}
    if fleet.host.power:
        host["power"] = render_power(fleet.host.power)
    if host:
        content["host"] = host
    if fleet.network:
        content["network"] = fleet.network
    if fleet.emulated:
        content["emulated"] = True
    content["defaults"] = {key: value for key, value in defaults.items() if value not in ("", [])}
    if jumps.hosts:
        content["jump_hosts"] = [_jump_entry(node, defaults, jumps) for node in jumps.hosts]
    content["nodes"] = list(_fold(fleet.nodes, [_node_entry(node, defaults, jumps) for node in fleet.nodes]))
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=200)
    return f"# {' '.join(origin.split())}; change it as you like.\n{text}"


class _JumpNames:
    """The jump hosts of some nodes, with unique names; a jump host that is also a node keeps its name."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._names = {_as_jump(node): node.name for node in nodes}
        taken = {node.name for node in nodes}
        self.hosts: list[Node] = []
        for jump in _chain(nodes):
            if jump not in self._names:
                name = next(name for name in _candidates(jump.name) if name not in taken)
                taken.add(name)
                self._names[jump] = name
                self.hosts.append(jump)

    def name(self, jump: Node | None) -> str:
        """Return the value of `jump:` for a node behind `jump`."""
        return self._names[_as_jump(jump)] if jump else ""


def _chain(nodes: Iterable[Node]) -> Iterable[Node]:
    for node in nodes:
        jump = node.jump
        while jump:
            yield _as_jump(jump)
            jump = jump.jump


def _candidates(name: str) -> Iterable[str]:
    yield name
    yield from (f"{name}-{number}" for number in range(2, 1 << 16))


def _as_jump(node: Node) -> Node:
    """Return `node` with only the fields that matter for a jump host."""
    return replace(
        node, python="python3", groups=(), power=None, jump=_as_jump(node.jump) if node.jump else None
    )


def _defaults(nodes: Sequence[Node], machines: Sequence[Node], jumps: _JumpNames) -> YamlMapping:
    keys = {node.key for node in machines}
    return {
        "port": _most_common(node.port for node in nodes),
        "user": _most_common(node.user for node in machines),
        "key": str(nodes[0].key)
        if len(keys) == 1 and nodes[0].key
        else "",  # a missing key cannot be expressed
        "python": _most_common(node.python for node in nodes),
        "group": _show_groups(_most_common(node.groups for node in nodes)),
        "jump": _most_common(jumps.name(node.jump) for node in nodes),
    }


def _most_common(values: Iterable[object]) -> object:
    return Counter(values).most_common(1)[0][0]


def _node_entry(node: Node, defaults: YamlMapping, jumps: _JumpNames) -> YamlMapping:
    own: YamlMapping = {
        "port": node.port,
        "user": node.user,
        "key": str(node.key) if node.key else "",
        "python": node.python,
        "group": _show_groups(node.groups),
        "jump": jumps.name(node.jump) or (NO_JUMP if defaults["jump"] else ""),
    }
    entry = {key: value for key, value in own.items() if value != defaults[key]}
    return entry | ({"power": render_power(node.power)} if node.power else {})


def _jump_entry(node: Node, defaults: YamlMapping, jumps: _JumpNames) -> YamlMapping:
    entry: YamlMapping = {"name": jumps.name(node), "address": node.address}
    own = {"port": (node.port, 22), "user": (node.user, defaults["user"])}
    own["key"] = (str(node.key) if node.key else "", defaults["key"])
    own["jump"] = (jumps.name(node.jump), "")
    return entry | {key: value for key, (value, default) in own.items() if value != default}


def _show_groups(groups: object) -> object:
    assert isinstance(groups, tuple)
    return groups[0] if len(groups) == 1 else list(groups)


def _fold(nodes: Sequence[Node], entries: Sequence[YamlMapping]) -> Iterable[YamlMapping]:
    """Yield one entry for consecutive nodes with the same settings and consecutive names and addresses."""
    start = 0
    for end in range(1, len(nodes) + 1):
        if end == len(nodes) or entries[end] != entries[start]:
            rows = [(node.name, node.address) for node in nodes[start:end]]
            for _, _, (name, address) in fold_ordered(rows):
                yield {"name": name, "address": address, **entries[start]}
            start = end
