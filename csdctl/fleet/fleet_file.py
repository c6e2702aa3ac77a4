"""fleet.yaml: reading and writing.

`load_fleet` is the only way to load a Fleet from a file. An entry with ranges expands to many nodes.
"""

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import BeforeValidator, TypeAdapter, ValidationError, model_validator, with_config

from csdctl.documents import STRICT, load_document
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, MAX_HOPS, SERVER_MARK, Fleet, Node, Server
from csdctl.fleet.names import MAX_RANGE, count_range, expand_range, fold_rows, format_node_names
from csdctl.fleet.network import is_this_machine

TRAINING_KEYS = ("python", "group", "power", "device", "env", "state")
"""Keys of a node that a jump host does not have."""
KEYS_FROM_DEFAULTS = ("user", "key", "offers_agent")
"""Keys that a jump host has from `defaults`."""
YamlMapping = dict[str, object]
NodeT = TypeVar("NodeT", bound=Node)


def _name_defaults(content: object) -> object:
    if not isinstance(content, dict):
        return content
    if stated := content.keys() & {"name", "address"}:
        raise ValueError(f"received `{min(stated)}`, which only a node has")
    return {"name": "defaults", "address": "defaults", **content}


Defaults = Annotated[Node, BeforeValidator(_name_defaults)]
"""Settings of all nodes. Name and address have no meaning."""
_DEFAULTS: TypeAdapter[Node] = TypeAdapter(Defaults)


@with_config(STRICT)
@dataclass(frozen=True)
class FleetFile(Fleet):
    """The content of fleet.yaml, before ranges are expanded and servers and jump hosts are resolved."""

    defaults: Defaults = field(default_factory=lambda: Node("defaults", "defaults"))
    jump_hosts: tuple[Node, ...] = ()
    servers: tuple[Server, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Add what `defaults` states to all entries. Invalid defaults are reported once only."""
        defaults, jump_hosts = content.get("defaults", {}), content.get("jump_hosts", [])
        for entry in jump_hosts if isinstance(jump_hosts, list) else ():
            if isinstance(entry, dict) and (unusable := entry.keys() & TRAINING_KEYS):
                raise ValueError(f"received `{min(unusable)}` in `jump_hosts`, which only a node has")
        try:
            _DEFAULTS.validate_python(defaults)
        except ValidationError:
            return content
        of_jump_host = {key: value for key, value in defaults.items() if key in KEYS_FROM_DEFAULTS}
        filled = {key: _fill(content[key], defaults) for key in ("nodes", "servers") if key in content}
        return content | filled | {"jump_hosts": _fill(jump_hosts, of_jump_host)}

    @model_validator(mode="after")
    def _has_nodes_or_servers(self) -> Self:
        if self.nodes and self.servers:
            expected = "the nodes of each server in its entry"
            raise ValueError(f"received both `nodes` and `servers`; expected {expected}")
        if len({server.name for server in self.servers}) < len(self.servers):
            raise ValueError("two of `servers` have one name")
        entries = (*self.jump_hosts, *self.nodes, *self.servers, *(n for s in self.servers for n in s.nodes))
        num_nodes = sum(count_range(entry.name) for entry in entries)
        if num_nodes > MAX_RANGE:
            raise ValueError(f"the entries expand to {num_nodes:,} nodes, expected at most {MAX_RANGE:,}")
        return self


def _fill(entries: Any, defaults: YamlMapping) -> Any:
    if not isinstance(entries, list):
        return entries
    return [
        {**defaults, **entry, **({"nodes": _fill(entry["nodes"], defaults)} if "nodes" in entry else {})}
        if isinstance(entry, dict)
        else entry
        for entry in entries
    ]


def load_fleet(path: Path) -> Fleet:
    """Read fleet.yaml. Raises InputError for invalid content, no nodes, duplicate names or cyclic jumps."""
    remedy = "write it with `csdctl discover --cidr` or `csdctl emulate up`, or use another one with --fleet"
    file = load_document(path, FleetFile, remedy=remedy)
    if file.servers:
        return _load_servers(path, file)
    if not file.nodes:
        remedy = "add nodes, or find them with `csdctl discover --cidr`"
        raise InputError(f"{path}: the fleet is empty", remedy=remedy)
    jump_hosts, nodes = (_expand(entries, path.parent) for entries in (file.jump_hosts, file.nodes))
    _check_names(path, [*jump_hosts, *nodes])
    machines = {machine.name: machine for machine in (*jump_hosts, *nodes)}
    [defaults] = _expand([file.defaults], path.parent)
    try:
        _check_spelling(machines)
        nodes = [replace(node, jump=_resolve(node.jump, machines, defaults, (node.name,))) for node in nodes]
    except ValueError as error:
        raise InputError(f"{path}: {error}", remedy=f"fix `jump` in {path}") from None
    return Fleet(tuple(nodes), file.host, file.network, file.emulated, path)


def _load_servers(path: Path, file: FleetFile) -> Fleet:
    """Return the fleet of several servers. csdctl runs on one of them, whose rank is the host's.

    A host that does not train may be another machine. Raises InputError when none or several servers have an
    address of this machine, or two machines have one name.
    """
    servers = _expand(file.servers, path.parent)
    here = [server for server in servers if is_this_machine(server.address)]
    if len(here) > 1 or (not here and file.host.trains):
        matches = format_node_names(server.name for server in here) or "none of them"
        raise InputError(
            f"{path}: of `servers`, {matches} has an address of this machine; expected exactly one",
            remedy="run csdctl on one of the servers, and list it with an address of its own; "
            "or write `host: {trains: false}` for a machine that only coordinates",
        )
    _check_names(path, [server for server in servers if server not in here])
    machines: list[Node] = []
    for server in [*here, *(server for server in servers if server not in here)]:
        nodes = _expand(server.nodes, path.parent)
        _check_names(path, nodes)
        if any(machine.jump for machine in (server, *nodes)):
            problem = f"received `jump` in server {server.name!r}; its nodes are reached through it"
            raise InputError(f"{path}: {problem}")
        name, is_here = server.name, server in here
        jump = replace(server, groups=(*server.groups, name), server=name, nodes=())
        machines += [] if is_here else [jump]
        for node in nodes:
            place = {"jump": None, "server": ""} if is_here else {"jump": jump, "server": name}
            node_name, groups = f"{name}{SERVER_MARK}{node.name}", (*node.groups, name)
            machines.append(replace(node, name=node_name, groups=groups, **place))
    fleet = Fleet(tuple(machines), file.host, "", file.emulated, path, between=file.network)
    for server in here:
        fleet = replace(fleet, network=server.network, here=server.name, here_state=server.state)
    return fleet


def _expand(entries: Iterable[NodeT], directory: Path) -> list[NodeT]:
    """Return an entry for each name and address of ranges. Paths of keys are relative to `directory`."""
    return [
        replace(
            entry,
            name=name,
            address=address,
            key=entry.key and directory / entry.key,
            other_keys=tuple(directory / key for key in entry.other_keys),
        )
        for entry in entries
        for name, address in zip(expand_range(entry.name), expand_range(entry.address), strict=True)
    ]


def _check_names(path: Path, machines: Iterable[Node]) -> None:
    for name, count in Counter(machine.name for machine in machines).items():
        if name == HOST_NAME:
            problem = f"{name!r} is not allowed as a node name: csdctl uses this name for its own machine"
            remedy = "give the node another `name`; its `address` may stay"
            raise InputError(f"{path}: {problem}", remedy=remedy)
        if count > 1:
            problem = f"{path}: two nodes have the name {name!r}"
            raise InputError(problem, remedy="give each node a unique name")


def _check_spelling(machines: Mapping[str, Node]) -> None:
    """Raise ValueError for a hop whose address is the name of a machine but for a letter."""
    addresses = {hop.address for machine in machines.values() for hop in machine.jumps}
    for address in addresses - machines.keys():
        near = difflib.get_close_matches(address, machines, n=1, cutoff=0.8)
        if near and re.sub(r"\D", "", near[0]) == re.sub(r"\D", "", address):
            raise ValueError(f"jump {address!r} is not in the file; did you mean {near[0]!r}?")


def _resolve(
    hop: Node | None, machines: Mapping[str, Node], defaults: Node, passed: tuple[str, ...]
) -> Node | None:
    """Return a hop of a ProxyJump as a machine, with its own jump hosts. `passed` are the machines behind it.

    It is the name of one of `machines`, or an address with user and keys of `defaults`. Raises ValueError for
    a cycle or a long chain.
    """
    if hop is None:
        return None
    if hop.name in passed:
        raise ValueError(f"cyclic jumps: {' → '.join([*passed, hop.name])}")
    if len(passed) > MAX_HOPS:
        raise ValueError(f"{passed[0]} is behind more than {MAX_HOPS} jump hosts")
    is_name = hop.address in machines and not hop.user and not hop.port
    address = replace(
        hop,
        port=hop.port or 22,
        user=hop.user or defaults.user,
        key=defaults.key,
        other_keys=defaults.other_keys,
        offers_agent=defaults.offers_agent,
    )
    machine = machines[hop.address] if is_name else address
    # As with ssh -J, only the first hop of a chain uses its own `jump`.
    before = _resolve(hop.jump or machine.jump, machines, defaults, (*passed, hop.name))
    return replace(machine, jump=before)


def render_fleet(fleet: Fleet, *, origin: str) -> str:
    """Return fleet.yaml with network and nodes as `discover` finds them, and `origin` in its first line."""
    names = _name_jump_hosts(fleet.nodes)
    node_names, of_jumps = {node.name for node in fleet.nodes}, ("key", "offers_agent")
    nodes = [_settings(node, names) for node in fleet.nodes]
    jump_hosts = [
        {"name": name, "address": jump.address, **_settings(jump, names)}
        for jump, name in names.items()
        if name not in node_names
    ]
    defaults = {
        key: value
        for key, value in nodes[0].items()
        if all(entry[key] == value for entry in (nodes + jump_hosts if key in of_jumps else nodes))
    }
    content: YamlMapping = {
        "network": fleet.network,
        "defaults": _without_empty(defaults),
        "jump_hosts": [_without_empty(entry, {"python": ""}) for entry in jump_hosts],
        "nodes": list(_fold(fleet.nodes, [_without_empty(entry, defaults) for entry in nodes])),
    }
    text = yaml.safe_dump(
        _without_empty(content), sort_keys=False, allow_unicode=True, default_flow_style=None, width=200
    )
    return f"# {' '.join(origin.split())}; change it as you like.\n{text}"


def _without_empty(content: YamlMapping, defaults: Mapping[str, object] = {}) -> YamlMapping:
    return {key: value for key, value in content.items() if key not in defaults and value}


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
    jump = _as_jump_host(node.jump) if node.jump else None
    return replace(node, python="python3", groups=(), jump=jump)


def _settings(node: Node, jump_names: Mapping[Node, str]) -> YamlMapping:
    return {
        "port": node.port,
        "user": node.user,
        "key": str(node.key or "") if len(node.keys) < 2 else list(map(str, node.keys)),
        "offers_agent": node.offers_agent,
        "python": node.python,
        "group": node.groups[0] if len(node.groups) == 1 else list(node.groups),
        "jump": jump_names[_as_jump_host(node.jump)] if node.jump else "",
    }


def _fold(nodes: Sequence[Node], entries: Sequence[YamlMapping]) -> Iterator[YamlMapping]:
    """Yield one entry for consecutive nodes with the same settings and consecutive names and addresses."""
    for _, group in itertools.groupby(zip(nodes, entries, strict=True), key=lambda pair: pair[1]):
        pairs = list(group)
        for name, address in fold_rows([(node.name, node.address) for node, _ in pairs]):
            yield {"name": name, "address": address, **pairs[0][1]}
