"""Ansible's YAML inventories, and the JSON output of `ansible-inventory --list`; pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from csdctl.documents import parse_json_document
from csdctl.documents.yaml_text import build, compose
from csdctl.errors import InputError
from csdctl.fleet.ansible.inventory import Inventory, Value, Variables, expand_hosts, split_port

META = "_meta"
_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}
"""Of YAML 1.1, which Ansible reads."""


class Vaulted:
    """A value that only Ansible can decrypt."""


def parse_list_output(text: str, name: str) -> Inventory | None:
    """Parse the output of `ansible-inventory --list`; None for other text; raises InputError."""
    try:
        content = parse_json_document(text, name)
    except InputError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get(META), dict):
        return None
    inventory = Inventory()
    try:
        variables = content.pop(META)["hostvars"]
        for group, entry in content.items():
            inventory.group(group)
            for child in _names(entry, "children"):
                inventory.add_child(group, child, name)
            for host in _names(entry, "hosts"):
                inventory.add_host(host, group, {})
        for host, own in variables.items():
            values = {key: Value(_plain(value), f"{name}, host {host}") for key, value in own.items()}
            inventory.hosts.setdefault(host, {}).update(values)
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{name} is not output of `ansible-inventory --list`") from None
    inventory.finish()
    return inventory


def _names(entry: Mapping[str, object], key: str) -> Sequence[str]:
    """Return the names in a list of an entry; raises TypeError for anything else."""
    names = entry.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError
    return names


def _plain(value: object) -> object:
    """Return a value without the wrapper of Ansible's JSON."""
    if isinstance(value, dict):
        if "__ansible_vault" in value:
            return Vaulted()
        return value.get("__ansible_unsafe", value)
    return value


def parse_yaml(text: str, name: str) -> Inventory | None:
    """Parse a YAML inventory; return None if it is not a mapping; raises InputError with the line."""
    try:
        tree = compose(text, name)
    except InputError:
        return None
    if not isinstance(tree, yaml.MappingNode):
        return None
    reader = _Reader(Inventory(), name)
    for key, node in reader.entries(tree):
        if key == "plugin":
            raise InputError(
                f"{name} configures an inventory plugin, which only Ansible can run",
                remedy=f"run `ansible-inventory -i {name} --list > inventory.json` and give that file",
            )
        reader.read_group(key, node)
    reader.inventory.finish()
    return reader.inventory


def parse_variables(text: str, name: str) -> Variables:
    """Parse the variables of a file of group_vars/ or host_vars/; raises InputError."""
    tree = compose(text, name)
    if tree is None:
        return {}
    return _Reader(Inventory(), name).read_variables(tree)


class _Reader:
    """Traverses the nodes of a YAML file, which have line numbers."""

    def __init__(self, inventory: Inventory, name: str) -> None:
        self.inventory = inventory
        self._name = name

    def read_group(self, name: str, node: yaml.Node) -> None:
        """Read one group with its content."""
        group = self.inventory.group(name)
        for section, inside in self._sections(name, node):
            if section == "vars":
                group.variables.update(self.read_variables(inside))
            elif section == "children":
                for child, below in self._names(inside):
                    self.read_group(child, below)
                    self.inventory.add_child(name, child, self._where(inside))
            else:
                for pattern, variables in self._names(inside):
                    self._read_hosts(name, pattern, variables)

    def read_variables(self, node: yaml.Node) -> Variables:
        """Return the keys of a mapping, each with its value and line."""
        if _is_null(node):
            return {}
        return {key: Value(self._value(value), self._where(value)) for key, value in self.entries(node)}

    def entries(self, node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
        """Yield keys and values of a mapping, with merge keys resolved; raises InputError otherwise."""
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"{self._where(node)}: expected keys and values, as in `name: value`")
        merged: dict[str, yaml.Node] = {}
        own: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise InputError(f"{self._where(key)}: expected a name, found a list or mapping")
            if key.value == "<<":
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    merged = dict(self.entries(part)) | merged
            else:
                own[key.value] = value
        yield from (merged | own).items()

    def _sections(self, group: str, node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
        if _is_null(node):
            return
        for section, inside in self.entries(node):
            if section not in ("vars", "children", "hosts"):
                raise InputError(
                    f"{self._where(inside)}: group {group!r} has {section!r}: "
                    "expected `hosts`, `children` or `vars`"
                )
            if not _is_null(inside):
                yield section, inside

    def _names(self, node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
        """Yield the entries of `hosts` or `children`, which may also be a single name."""
        if isinstance(node, yaml.ScalarNode):
            yield node.value, yaml.ScalarNode("tag:yaml.org,2002:null", "", node.start_mark, node.end_mark)
        else:
            yield from self.entries(node)

    def _read_hosts(self, group: str, text: str, node: yaml.Node) -> None:
        pattern, port = split_port(text)
        where = self._where(node)
        variables: Variables = {} if port is None else {"ansible_port": Value(port, where)}
        variables |= self.read_variables(node)
        for host in expand_hosts(pattern, where):
            self.inventory.add_host(host, group, variables)

    def _value(self, node: yaml.Node) -> Any:
        if node.tag == "!vault":
            return Vaulted()
        if node.tag == "!unsafe":
            return node.value
        if not isinstance(node, yaml.ScalarNode):
            return node.value  # no setting of a connection is a list or mapping: its items do not matter
        is_plain = node.style is None
        return _BOOLEANS.get(node.value.lower() if is_plain else "", build(node, self._name))

    def _where(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
