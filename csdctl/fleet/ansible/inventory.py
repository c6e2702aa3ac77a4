"""The content of an Ansible inventory: nested groups, hosts, and variables with their source.

ini.py and tree.py read the files; this module implements the precedence of variables that Ansible documents
(inventory, then group_vars/, then host_vars/).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from csdctl.errors import InputError
from csdctl.fleet.names import MAX_PATTERN, MAX_RANGE

ALL, UNGROUPED = "all", "ungrouped"
MAX_HOSTS = 10_000
MAX_GROUPS = 1000
MAX_CHILDREN = 5000
"""Groups in groups."""
MAX_NESTED = 50
"""Groups in groups in groups …"""
MAX_MEMBERS = 1_000_000
"""Hosts in groups, directly or through other groups."""
MAX_VARIABLES = 5_000_000
"""Variables of all hosts, those of their groups included."""
_PRIORITY = "ansible_group_priority"
_PORT = re.compile("[0-9]{1,5}")


@dataclass(frozen=True)
class Value:
    """A variable's value, with its file and line."""

    value: object
    where: str


Variables = dict[str, Value]


@dataclass
class InventoryGroup:
    """A group: its variables, and the names of its hosts and child groups."""

    variables: Variables = field(default_factory=dict)
    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)


@dataclass
class Inventory:
    """All groups and hosts of an inventory, in reading order."""

    groups: dict[str, InventoryGroup] = field(
        default_factory=lambda: {ALL: InventoryGroup(), UNGROUPED: InventoryGroup()}
    )
    hosts: dict[str, Variables] = field(default_factory=dict)
    group_files: dict[str, Variables] = field(default_factory=dict)
    """Variables of group_vars/, by group."""
    host_files: dict[str, Variables] = field(default_factory=dict)
    """Variables of host_vars/, by host."""
    defaults: Variables = field(default_factory=dict)
    """Defaults for all hosts, from ansible.cfg."""
    warnings: list[str] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    def group(self, name: str) -> InventoryGroup:
        """Return group `name`, created if necessary; raises InputError when there are too many."""
        if name not in self.groups:
            self._count("groups", 1, MAX_GROUPS)
        return self.groups.setdefault(name, InventoryGroup())

    def add_host(self, name: str, group: str, variables: Mapping[str, Value]) -> None:
        """Add host `name` to `group`; merge `variables` into the host's variables."""
        if name not in self.hosts:
            self._count("hosts", 1, MAX_HOSTS)
        self._count("hosts in groups", 1, MAX_MEMBERS)
        self.group(group).hosts[name] = None
        self.hosts.setdefault(name, {}).update(variables)

    def add_child(self, group: str, child: str, where: str) -> None:
        """Add group `child` to `group`; raises InputError for a cycle."""
        self.group(child)
        self._count("groups in groups", 1, MAX_CHILDREN)
        if group == child or group in self._below(child):
            raise InputError(f"{where}: group {child!r} contains group {group!r} and cannot be its child")
        self.group(group).children[child] = None

    def groups_of(self, host: str) -> list[str]:
        """Return the groups of `host`, outermost first: `all`, then by depth, priority and name."""
        return sorted(self._memberships[host], key=self._rank)

    def variables_of(self, host: str) -> Variables:
        """Return the effective variables of `host`."""
        groups = self.groups_of(host)
        layers = [self.groups[name].variables for name in groups]
        layers += [self.group_files.get(name, {}) for name in groups]
        layers += [self.hosts[host], self.host_files.get(host, {})]
        self._count("variables of hosts", sum(map(len, layers)), MAX_VARIABLES)
        merged = {name: value for layer in layers for name, value in layer.items()}
        merged.pop(_PRIORITY, None)  # for Ansible this is the priority of a group, not a variable
        return merged

    def finish(self) -> None:
        """Compute depths and memberships after reading."""
        self._depths = {ALL: 0}
        inside = {child for group in self.groups.values() for child in group.children}
        for name in self.groups:
            if name not in inside and name != ALL:
                self._set_depth(name, 1)
        for name in self.groups[ALL].children:
            self._set_depth(name, 1)
        self._memberships: dict[str, set[str]] = {host: {ALL} for host in self.hosts}
        for name in self.groups:
            for below in (name, *self._below(name)):
                self._count("hosts in groups", len(self.groups[below].hosts), MAX_MEMBERS)
                for host in self.groups[below].hosts:
                    self._memberships[host].add(name)

    def _count(self, what: str, number: int, limit: int) -> None:
        """Add to the size of the inventory; raises InputError beyond `limit`."""
        self._counts[what] += number
        if self._counts[what] > limit:
            raise InputError(f"the inventory has more than {limit:,} {what}", remedy="give a smaller one")

    def _set_depth(self, name: str, depth: int) -> None:
        if depth > MAX_NESTED:
            raise InputError(f"group {name!r} is inside of more than {MAX_NESTED} groups")
        if self._depths.get(name, -1) < depth:
            self._depths[name] = depth
            for child in self.groups[name].children:
                self._set_depth(child, depth + 1)

    def _below(self, name: str) -> set[str]:
        found: set[str] = set()
        pending = list(self.groups[name].children)
        while pending:
            child = pending.pop()
            if child not in found:
                found.add(child)
                pending += self.groups[child].children
        return found

    def _rank(self, name: str) -> tuple[int, int, str]:
        own = self.groups[name].variables.get(_PRIORITY)
        priority = int(str(own.value)) if own and _PORT.fullmatch(str(own.value)) else 1
        return self._depths[name], priority, name


def expand_hosts(pattern: str, where: str) -> list[str]:
    """Expand `csd[00:35]`, `[a:f]`, `[0:10:2]` to names; raises InputError."""
    if len(pattern) > MAX_PATTERN:
        raise InputError(f"{where}: a name of {len(pattern):,} characters, expected at most {MAX_PATTERN}")
    heads, rest = [""], pattern
    while True:
        head, bracket, tail = rest.partition("[")
        inner, closing, tail = tail.partition("]")
        if not bracket or not closing or ":" not in inner:
            return [f"{name}{rest}" for name in heads]
        try:
            names = list(_count(inner))
        except ValueError as error:
            raise InputError(f"{where}: range [{inner}] in {pattern!r} is invalid: {error}") from None
        if len(names) * len(heads) > MAX_RANGE:
            raise InputError(f"{where}: {pattern!r} expands to more than {MAX_RANGE:,} hosts")
        heads = [f"{start}{head}{name}" for start in heads for name in names]
        rest = tail


def _count(inner: str) -> Iterator[str]:
    first, last, *steps = inner.split(":")
    step = int(steps[0]) if steps else 1
    first = first or "0"
    if len(steps) > 1 or not last or step < 1:
        raise ValueError("expected [first:last] or [first:last:step]")
    if first.isalpha() and last.isalpha() and len(first) == len(last) == 1:
        letters = range(_letter(first), _letter(last) + 1, step)
        yield from (_LETTERS[number] for number in letters)
        return
    width = len(first) if first.startswith("0") and len(first) > 1 else 0
    if width and width != len(last):
        raise ValueError("both ends need the same number of digits")
    if int(last) - int(first) > MAX_RANGE * step:
        raise ValueError(f"it expands to more than {MAX_RANGE:,} hosts")
    for number in range(int(first), int(last) + 1, step):
        yield f"{number:0{width}d}"


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _letter(letter: str) -> int:
    return _LETTERS.index(letter)


def split_port(pattern: str) -> tuple[str, int | None]:
    """Split `name:2222` and `[fd00::1]:2222` into host pattern and port; without a port, return the text."""
    head, colon, port = pattern.rpartition(":")
    if not colon or not _PORT.fullmatch(port):
        return pattern, None
    if head.startswith("[") and head.endswith("]") and head.count("[") == 1:
        return head[1:-1], int(port)
    if ":" in _without_ranges(head) or head.count("[") != head.count("]"):
        return pattern, None  # an IPv6 address, or inside a range
    return head, int(port)


def _without_ranges(text: str) -> str:
    while "[" in text and "]" in text:
        text = text[: text.index("[")] + text[text.index("]") + 1 :]
    return text
