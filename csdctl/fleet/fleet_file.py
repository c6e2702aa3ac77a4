"""fleet.yaml: its models, reading and writing.

`load_fleet` is the only way to load a Fleet from a file. An entry with ranges expands to many nodes.
"""

import difflib
import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from csdctl.documents import Document, load_document
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, SERVER_MARK, Env, Fleet, Host, Node, PowerSource
from csdctl.fleet.names import (
    ADDRESS,
    AN_ADDRESS,
    GROUP,
    MAX_RANGE,
    NAME,
    USER,
    count_range,
    expand_range,
    fold_rows,
    format_node_names,
    range_ends,
)
from csdctl.fleet.network import means_host, own_names
from csdctl.fleet.openssh import MAX_HOPS, parse_jump
from csdctl.worker.protocol.run_spec import AUTO, Device

_A_NAME = "name (letters, digits, '.', '_', '-')"


def render_power(power: PowerSource | None) -> object:
    """Return `power` as fleet.yaml has it. '' for none."""
    if power is None:
        return ""
    content = power.model_dump(exclude_defaults=True)
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


Name = Annotated[str, _matching(NAME, _A_NAME)]
Address = Annotated[str, _matching(ADDRESS, AN_ADDRESS)]
Groups = Annotated[
    list[Annotated[str, _matching(GROUP, "group (no spaces, commas or brackets)")]],
    BeforeValidator(lambda value: ([value] if value else []) if isinstance(value, str) else value),
]
Network = Annotated[
    str, AfterValidator(lambda value: value and str(ipaddress.ip_network(value, strict=False)))
]


def _check_jump(value: str) -> str:
    parse_jump(value)
    return value


def _as_key(value: Path) -> Path:
    try:
        if value.suffix == ".pub":
            raise ValueError(f"expected the private key, probably {value.with_suffix('').name}")
        return value.expanduser()
    except RuntimeError:
        raise ValueError("there is no home directory of this user") from None


class Connection(Document):
    """Settings of the connection to a machine."""

    port: Annotated[int, Field(ge=1, le=65535)] = 22
    user: Annotated[str, _matching(USER, "user name")] = "root"
    key: Annotated[
        list[Path],
        BeforeValidator(lambda value: value if isinstance(value, list) else [value] if value else []),
        AfterValidator(lambda paths: [_as_key(path) for path in paths]),
    ] = []
    offers_agent: bool = False
    jump: Annotated[str, AfterValidator(_check_jump)] = ""


class NodeSettings(Connection):
    """Settings of a node, in `defaults` of all nodes."""

    python: Annotated[str, Field(pattern=r"^[^\x00-\x1f-][^\x00-\x1f]*$")] = "python3"
    group: Groups = []
    power: PowerSource | None = None
    device: Device = AUTO
    env: Env = {}
    state: Annotated[str, Field(pattern=r"^(/[^\x00-\x1f]*)?$")] = ""

    @field_validator("python")
    @classmethod
    def _is_name_or_absolute(cls, value: str) -> str:
        if "/" in value and not value.startswith("/"):
            raise ValueError("expected the name of a program or an absolute path")
        return value


class NodeEntry(NodeSettings):
    """An entry of `nodes` in fleet.yaml. `csd[0-35]` with as many addresses is a range of nodes."""

    name: Annotated[str, _matching(NAME, _A_NAME, ranges=True)]
    address: Annotated[str, _matching(ADDRESS, AN_ADDRESS, ranges=True)]

    @model_validator(mode="after")
    def _have_equal_lengths(self) -> Self:
        num_names, num_addresses = count_range(self.name), count_range(self.address)
        if num_names != num_addresses:
            names = f"name {self.name!r} expands to {num_names} nodes"
            addresses = f"address {self.address!r} to {num_addresses}"
            raise ValueError(f"{names}, but {addresses}; expected equal numbers")
        return self


class ServerEntry(NodeSettings):
    """A server with its own nodes, in `servers` of fleet.yaml."""

    name: Name
    address: Address
    network: Network = ""
    nodes: list[NodeEntry] = []


class JumpHostEntry(Connection):
    """A jump host that does not train."""

    name: Name
    address: Address


class FleetFile(Document):
    """The content of fleet.yaml."""

    host: Host = Host()
    network: Network = ""
    emulated: bool = False
    defaults: NodeSettings = NodeSettings()
    jump_hosts: list[JumpHostEntry] = []
    nodes: list[NodeEntry] = []
    servers: list[ServerEntry] = []

    @model_validator(mode="after")
    def _has_not_too_many_nodes(self) -> Self:
        if self.nodes and self.servers:
            expected = "the nodes of each server in its entry"
            raise ValueError(f"received both `nodes` and `servers`; expected {expected}")
        if len({server.name for server in self.servers}) < len(self.servers):
            raise ValueError("two of `servers` have one name")
        entries = (*self.nodes, *(entry for server in self.servers for entry in server.nodes))
        num_nodes = sum(count_range(entry.name) for entry in entries)
        if num_nodes > MAX_RANGE:
            raise ValueError(f"the entries expand to {num_nodes:,} nodes, expected at most {MAX_RANGE:,}")
        return self


def load_fleet(path: Path) -> Fleet:
    """Read fleet.yaml. Raises InputError for invalid content, no nodes, duplicate names or cyclic jumps."""
    remedy = "write it with `csdctl discover --cidr` or `csdctl emulate up`, or use another one with --fleet"
    file = load_document(path, FleetFile, remedy=remedy)
    if not file.nodes and not file.servers:
        remedy = "add nodes, or find them with `csdctl discover --cidr`"
        raise InputError(f"{path}: the fleet is empty", remedy=remedy)
    directory = path.parent
    if file.servers:
        return _load_servers(path, file, directory)
    shared = ("user", "key", "offers_agent")
    of_jump_hosts = NodeSettings(**{name: getattr(file.defaults, name) for name in shared})
    jump_hosts = [_nodes(entry, of_jump_hosts, directory)[0] for entry in file.jump_hosts]
    nodes = [node for entry in file.nodes for node in _nodes(entry, file.defaults, directory)]
    _check_names(path, [node.name for node, _ in jump_hosts], [node.name for node, _ in nodes])
    machines = {node.name: (node, jump) for node, jump in (*jump_hosts, *nodes)}
    resolver = _Jumps(machines, file.defaults.user, _resolve_keys(file.defaults, directory))
    try:
        resolved = tuple(replace(node, jump=resolver.resolve(jump, (node.name,))) for node, jump in nodes)
    except ValueError as error:
        raise InputError(f"{path}: {error}", remedy=f"fix `jump` in {path}") from None
    return Fleet(resolved, file.host, file.network, file.emulated, path)


def _load_servers(path: Path, file: FleetFile, directory: Path) -> Fleet:
    """Return the fleet of several servers. csdctl runs on one of them, whose rank is the host's.

    A host that does not train may be another machine. Raises InputError when none or several servers have an
    address of this machine, or two machines have one name.
    """
    own = own_names()
    here = [server for server in file.servers if means_host(server.address, own)]
    if len(here) > 1 or (not here and file.host.trains):
        found = format_node_names(server.name for server in here) or "none of them"
        raise InputError(
            f"{path}: of `servers`, {found} has an address of this machine; expected exactly one",
            remedy="run csdctl on one of the servers, and list it with an address of its own; "
            "or write `host: {trains: false}` for a machine that only coordinates",
        )
    others = [server for server in file.servers if server not in here]
    _check_names(path, [], [server.name for server in others])
    nodes: list[Node] = []
    here_state = ""
    for server in (*here, *others):
        entries = [pair for entry in server.nodes for pair in _nodes(entry, file.defaults, directory)]
        _check_names(path, [], [node.name for node, _ in entries])
        [(machine, jump)] = _nodes(server, file.defaults, directory)
        if jump or any(jump for _, jump in entries):
            problem = f"received `jump` in server {server.name!r}; its nodes are reached through it"
            raise InputError(f"{path}: {problem}")
        machine = replace(machine, groups=(*machine.groups, server.name), server=server.name)
        nodes += [machine] if server in others else []
        here_state = here_state if server in others else machine.state
        nodes += [
            replace(
                node,
                name=f"{server.name}{SERVER_MARK}{node.name}",
                groups=(*node.groups, server.name),
                jump=machine if server in others else None,
                server=machine.name if server in others else "",
            )
            for node, _ in entries
        ]
    networks = tuple((server.name, server.network) for server in others)
    network, name = (here[0].network, here[0].name) if here else ("", "")
    fixed = (tuple(nodes), file.host, network, file.emulated, path, networks, file.network)
    return Fleet(*fixed, name, here_state)


def _nodes(
    entry: NodeEntry | JumpHostEntry | ServerEntry, defaults: NodeSettings, directory: Path
) -> list[tuple[Node, str]]:
    """Return the nodes of `entry` without their jump hosts, each with the value of its `jump`."""
    stated = entry.model_fields_set & NodeSettings.model_fields.keys()
    own = {key: getattr(entry, key) for key in stated if getattr(entry, key) is not None}
    settings = defaults.model_copy(update=own)
    return [
        (
            Node(
                name=name,
                address=address,
                port=settings.port,
                user=settings.user,
                **_resolve_keys(settings, directory),
                python=settings.python,
                groups=tuple(dict.fromkeys(settings.group)),
                power=settings.power,
                device=settings.device,
                env=tuple(settings.env.items()),
                state=settings.state,
            ),
            settings.jump,
        )
        for name, address in zip(expand_range(entry.name), expand_range(entry.address), strict=True)
    ]


def _resolve_keys(settings: NodeSettings, directory: Path) -> dict[str, Any]:
    keys = tuple(directory / path for path in settings.key)
    return {"key": next(iter(keys), None), "other_keys": keys[1:], "offers_agent": settings.offers_agent}


def _check_names(path: Path, jump_hosts: Sequence[str], nodes: Sequence[str]) -> None:
    for name, count in Counter([*jump_hosts, *nodes]).items():
        if name == HOST_NAME:
            problem = f"{name!r} is not allowed as a node name: csdctl uses this name for its own machine"
            remedy = "give the node another `name`; its `address` may stay"
            raise InputError(f"{path}: {problem}", remedy=remedy)
        if count > 1:
            problem = f"{path}: two nodes have the name {name!r}"
            raise InputError(problem, remedy="give each node a unique name")


@dataclass
class _Jumps:
    """Resolves jump hosts of nodes: `machines`, with their own `jump`. Addresses get `user` and `keys`."""

    machines: Mapping[str, tuple[Node, str]]
    user: str
    keys: Mapping[str, Any]
    _found: dict[str, Node | None] = field(default_factory=dict)

    def resolve(self, jump: str, passed: tuple[str, ...]) -> Node | None:
        """Return the chain of `jump` behind `passed`. Raises ValueError for a cycle or a long chain."""
        if jump in self._found:
            return self._found[jump]
        before: Node | None = None
        for number, hop in enumerate(parse_jump(jump)):
            if hop.name in passed:
                raise ValueError(f"cyclic jumps: {' → '.join([*passed, hop.name])}")
            if len(passed) > MAX_HOPS:
                raise ValueError(f"{passed[0]} is behind more than {MAX_HOPS} jump hosts")
            found = self.machines.get(hop.address) if hop.user is None and hop.port is None else None
            if hop.address not in self.machines:
                self._check_spelling(hop.address)
            user = self.user if hop.user is None else hop.user
            direct = Node(name=hop.name, address=hop.address, port=hop.port or 22, user=user, **self.keys)
            node, own = found or (direct, "")
            # As with ssh -J, only the first hop of a chain uses its own `jump`.
            before = replace(node, jump=before if number else self.resolve(own, (*passed, hop.name)))
        if before and len(before.jumps) >= MAX_HOPS:
            raise ValueError(f"{passed[0]} is behind more than {MAX_HOPS} jump hosts")
        self._found[jump] = before
        return before

    def _check_spelling(self, address: str) -> None:
        """Raise ValueError for an address that is the name of a machine but for a letter."""
        near = difflib.get_close_matches(address, self.machines, n=1, cutoff=0.8)
        if near and re.sub(r"\D", "", near[0]) == re.sub(r"\D", "", address):
            raise ValueError(f"jump {address!r} is not in the file; did you mean {near[0]!r}?")


YamlMapping = dict[str, object]


def render_fleet(fleet: Fleet, *, origin: str) -> str:
    """Return fleet.yaml with `origin` in its first line. Raises InputError for a fleet without nodes."""
    if not fleet.nodes:
        raise InputError("a fleet needs at least one node")
    names = _name_jump_hosts(fleet.nodes)
    own, of_jumps = {node.name for node in fleet.nodes}, ("key", "offers_agent")
    nodes = [_settings(node, names) for node in fleet.nodes]
    jump_hosts = [
        {"name": name, "address": jump.address, **_settings(jump, names)}
        for jump, name in names.items()
        if name not in own
    ]
    defaults = {
        key: value
        for key, value in nodes[0].items()
        if all(entry[key] == value for entry in (nodes + jump_hosts if key in of_jumps else nodes))
    }
    host: YamlMapping = {
        "threads": fleet.host.threads,
        "power": render_power(fleet.host.power),
        "device": fleet.host.device.replace(AUTO, ""),
        "env": fleet.host.env,
    }
    content: YamlMapping = {
        "host": _without_empty(host) | ({} if fleet.host.trains else {"trains": False}),
        "network": fleet.network,
        "emulated": fleet.emulated,
        "defaults": _without_empty(defaults),
        "jump_hosts": [_without_empty(entry, {"python": ""}) for entry in jump_hosts],
        "nodes": list(_fold(fleet.nodes, [_without_empty(entry, defaults) for entry in nodes])),
    }
    text = yaml.safe_dump(
        _without_empty(content), sort_keys=False, allow_unicode=True, default_flow_style=None, width=200
    )
    return f"# {' '.join(origin.split())}; change it as you like.\n{text}"


def _without_empty(content: YamlMapping, defaults: Mapping[str, object] = {}) -> YamlMapping:
    return {
        key: value
        for key, value in content.items()
        if key not in defaults and value not in ("", None, 0, [], {})
    }


def _name_jump_hosts(nodes: Sequence[Node]) -> dict[Node, str]:
    """Return a unique name of each jump host. One that is also a node has the name of the node."""
    names = {_as_jump_host(node): node.name for node in nodes}
    taken, jumps = {node.name for node in nodes}, {}
    for jump in (_as_jump_host(jump) for node in nodes for jump in node.jumps):
        if jump not in names:
            numbers, names[jump] = itertools.count(2), jump.name
            while names[jump] in taken:
                names[jump] = f"{jump.name}-{next(numbers)}"
            taken.add(names[jump])
        jumps[jump] = names[jump]
    return jumps


def _as_jump_host(node: Node) -> Node:
    """Return `node` with only the fields that matter for a jump host."""
    jump = _as_jump_host(node.jump) if node.jump else None
    own = (node.name, node.address, node.port, node.user, node.key)
    return Node(*own, jump=jump, other_keys=node.other_keys, offers_agent=node.offers_agent)


def _settings(node: Node, jump_names: Mapping[Node, str]) -> YamlMapping:
    return {
        "port": node.port,
        "user": node.user,
        "key": str(node.key or "") if len(node.keys) < 2 else list(map(str, node.keys)),
        "offers_agent": node.offers_agent,
        "python": node.python,
        "group": node.groups[0] if len(node.groups) == 1 else list(node.groups),
        "jump": jump_names[_as_jump_host(node.jump)] if node.jump else "",
        "power": render_power(node.power),
        "device": node.device.replace(AUTO, ""),
        "env": dict(node.env),
        "state": node.state,
    }


def _fold(nodes: Sequence[Node], entries: Sequence[YamlMapping]) -> Iterator[YamlMapping]:
    """Yield one entry for consecutive nodes with the same settings and consecutive names and addresses."""
    for _, group in itertools.groupby(zip(nodes, entries, strict=True), key=lambda pair: pair[1]):
        pairs = list(group)
        for name, address in fold_rows([(node.name, node.address) for node, _ in pairs]):
            yield {"name": name, "address": address, **pairs[0][1]}
