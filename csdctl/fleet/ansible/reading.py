"""Read an Ansible inventory, with ansible.cfg and the group_vars/ and host_vars/ beside it, from disk.

The format is chosen as in Ansible: YAML by extension, or if a file without extension is a mapping; else INI.
JSON is the output of `ansible-inventory --list`.
"""

import ast
import configparser
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from csdctl.documents import load_text, parse_json_document, split_lines
from csdctl.documents.text import MAX_JSON_BYTES, MAX_TEXT_BYTES
from csdctl.documents.yaml_text import build, compose
from csdctl.errors import InputError
from csdctl.fleet.ansible.inventory import UNGROUPED, Inventory, Value, Variables, expand_hosts, split_port
from csdctl.notify import shorten

_SECTION = re.compile(r"\[([^:\]\s]+)(?::(\w+))?\]\s*(?:#.*)?")
_MAX_LITERAL = 1000
_GROUP = re.compile(r"([^:\]\s]+)\s*(?:#.*)?")


def parse_ini(text: str, name: str) -> Inventory:
    """Parse inventory `text` of file `name`; raises InputError with the line."""
    inventory = Inventory()
    group, section_type = UNGROUPED, "hosts"
    declared, used = {UNGROUPED, "all"}, dict[str, str]()
    for number, raw in enumerate(split_lines(text, name), start=1):
        line, where = raw.strip(), f"{name}:{number}"
        if not line or line[0] in "#;":
            continue
        if section := _SECTION.fullmatch(line):
            group, section_type = section[1], section[2] or "hosts"
            if section_type not in ("hosts", "children", "vars"):
                raise InputError(
                    f"{where}: section [{group}:{section_type}]: expected `hosts`, `children` or `vars`"
                )
            inventory.group(group)
            used.setdefault(group, where)
            declared |= set() if section_type == "vars" else {group}
        elif line.startswith("[") and line.endswith("]"):
            raise InputError(
                f"{where}: {line} is not a valid section: expected [group], [group:children], [group:vars]"
            )
        elif section_type == "hosts":
            _add_hosts(inventory, group, line, where)
        elif section_type == "vars":
            key, value = _assignment(line, where)
            inventory.group(group).variables[key] = value
        else:
            child = _group_name(line, where)
            used.setdefault(child, where)
            inventory.add_child(group, child, where)
    for undeclared in used.keys() - declared:
        raise InputError(
            f"{used[undeclared]}: group {undeclared!r} is not defined", remedy=f"add a section [{undeclared}]"
        )
    inventory.finish()
    return inventory


def _add_hosts(inventory: Inventory, group: str, line: str, where: str) -> None:
    try:
        first, *words = shlex.split(line, comments=True)
    except ValueError as error:
        raise InputError(f"{where}: not a host line: {error}") from None
    pattern, port = split_port(first)
    variables: Variables = {} if port is None else {"ansible_port": Value(port, where)}
    for word in words:
        key, value = _assignment(word, where)
        variables[key] = value
    for host in expand_hosts(pattern, where):
        inventory.add_host(host, group, variables)


def _assignment(text: str, where: str) -> tuple[str, Value]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{where}: expected key=value, found {text!r}")
    return key.strip(), Value(_literal(value.strip()), where)


def _literal(text: str) -> object:
    """Return the value of a Python literal, as in Ansible; else the text itself."""
    try:
        if len(text) > _MAX_LITERAL:
            return text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _group_name(line: str, where: str) -> str:
    found = _GROUP.fullmatch(line)
    if not found:
        raise InputError(f"{where}: expected a group name, found {line!r}")
    return found[1]


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


MAX_PROBLEM = 500
"""Characters; the parser lists every line that it cannot read."""

_VARIABLES = {
    ("defaults", "remote_user"): "ansible_user",
    ("defaults", "remote_port"): "ansible_port",
    ("defaults", "private_key_file"): "ansible_private_key_file",
    ("ssh_connection", "ssh_args"): "ansible_ssh_args",
    ("ssh_connection", "ssh_common_args"): "ansible_ssh_common_args",
    ("ssh_connection", "ssh_extra_args"): "ansible_ssh_extra_args",
}


def load_config(directory: Path, environment: Mapping[str, str] = os.environ) -> Variables:
    """Return the variables set by the first ansible.cfg that Ansible finds when called in `directory`.

    Raises InputError for a file that cannot be read.
    """
    named = environment.get("ANSIBLE_CONFIG")
    candidates = [Path(named)] if named else []
    candidates += [directory, Path.home() / ".ansible.cfg", Path("/etc/ansible/ansible.cfg")]
    files = [path / "ansible.cfg" if path.is_dir() else path for path in candidates]
    path = next((file for file in files if file.is_file()), None)
    return _read_config(path) if path else {}


def _read_config(path: Path) -> Variables:
    parser = configparser.ConfigParser(inline_comment_prefixes=(";",), interpolation=None, strict=False)
    try:
        parser.read_string(load_text(path), source=str(path))
    except configparser.Error as error:
        problem = shorten(" ".join(str(error).split()), MAX_PROBLEM)
        raise InputError(f"{path} cannot be read: {problem}") from None
    return {
        variable: Value(_resolve(path, variable, parser[section][key]), str(path))
        for (section, key), variable in _VARIABLES.items()
        if parser.has_option(section, key) and parser[section][key]
    }


def _resolve(path: Path, variable: str, text: str) -> str:
    """Return a key's path relative to its ansible.cfg; other values unchanged."""
    if variable != "ansible_private_key_file" or text.startswith(("/", "~", "{")):
        return text
    return str(path.absolute().parent / text)


_YAML_ENDINGS = (".yaml", ".yml", ".json")
_VAULT = "$ANSIBLE_VAULT"


def load_inventory(path: Path) -> Inventory:
    """Read the static inventory at `path`; raises InputError with file and line.

    Formats that only Ansible can read are errors too; the remedy shows how to export them.
    """
    text = _read(path, MAX_JSON_BYTES)
    remedy = f"run `ansible-inventory -i {path} --list > inventory.json` and give that file"
    if text.startswith("#!") or (os.access(path, os.X_OK) and path.is_file()):
        raise InputError(f"{path} is an inventory program, which only Ansible can run", remedy=remedy)
    if text.startswith(_VAULT):
        raise InputError(f"{path} is encrypted with Ansible Vault", remedy=remedy)
    inventory = parse_list_output(text, str(path))
    if inventory:
        return inventory
    if len(text) > MAX_TEXT_BYTES:
        raise InputError(f"{path} has {len(text):,} characters, expected at most {MAX_TEXT_BYTES:,}")
    if path.suffix in (*_YAML_ENDINGS, ""):
        inventory = parse_yaml(text, str(path))
    if inventory is None and path.suffix in _YAML_ENDINGS:
        parse_variables(text, str(path))  # raises an error with the line if it is not YAML
        raise InputError(f"{path}: expected groups, as in `all: {{hosts: …}}`")
    inventory = inventory or parse_ini(text, str(path))
    for name in inventory.groups:
        inventory.group_files[name] = _beside(path, "group_vars", name, inventory)
    for name in inventory.hosts:
        inventory.host_files[name] = _beside(path, "host_vars", name, inventory)
    return inventory


def _read(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    if path.is_dir():
        raise InputError(
            f"{path} is a directory, expected one inventory file",
            remedy=f"run `ansible-inventory -i {path} --list > inventory.json` and give that file",
        )
    return load_text(path, max_bytes=max_bytes, remedy="give the inventory that Ansible uses")


def _beside(inventory_path: Path, directory: str, name: str, inventory: Inventory) -> Variables:
    """Return the variables of group or host `name` from a file or directory in `directory`."""
    variables: Variables = {}
    if "/" in name:  # it would lead out of the directory
        return variables
    base = inventory_path.resolve().parent / directory
    candidates = [base / f"{name}{ending}" for ending in ("", ".yml", ".yaml", ".json")]
    found = next((path for path in candidates if os.path.exists(path)), None) if base.is_dir() else None
    files = [found] if found else []
    if found and found.is_dir():
        files = sorted(file for file in found.rglob("*") if _is_variable_file(file, found))
    for file in files:
        text = _read(file)
        if text.startswith(_VAULT):
            inventory.warnings.append(f"{file} is encrypted with Ansible Vault and was not read")
        else:
            variables |= parse_variables(text, str(file))
    return variables


def _is_variable_file(file: Path, base: Path) -> bool:
    parts = file.relative_to(base).parts
    hidden = any(part.startswith(".") or part.endswith("~") for part in parts)
    return file.is_file() and not hidden and file.suffix in ("", *_YAML_ENDINGS)
