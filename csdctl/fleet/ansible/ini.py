"""Ansible's INI inventories: `[group]`, `[group:children]`, `[group:vars]`, hosts with variables; pure."""

import ast
import re
import shlex
import warnings

from csdctl.documents import split_lines
from csdctl.errors import InputError
from csdctl.fleet.ansible.inventory import UNGROUPED, Inventory, Value, Variables, expand_hosts, split_port

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
