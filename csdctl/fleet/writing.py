"""Render nodes as a readable fleet.yaml, with common values in `defaults` and name ranges; pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import yaml

from csdctl.errors import InputError
from csdctl.fleet.jumps import NO_JUMP
from csdctl.fleet.model import Fleet, Node
from csdctl.fleet.power import render_power
from csdctl.fleet.ranges import fold_ordered

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
