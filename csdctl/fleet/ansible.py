"""Hosts of an Ansible inventory as OpenSSH targets, and a fleet as an Ansible inventory. Pure.

An inventory is read as `ansible-inventory --list` prints it, and ansible.cfg as `ansible-config dump` does:
Ansible itself knows all formats, the precedence of variables, plugins and vaults.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import yaml
from pydantic import Field

from csdctl.documents import check_values, parse_json_document
from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, Fleet, Node, select_names
from csdctl.fleet.names import ADDRESS, AN_ADDRESS, GROUP, NAME, format_node_names
from csdctl.fleet.openssh import Target, read_arguments

MAX_HOSTS = 10_000
MAX_GROUPS = 1000
MAX_MEMBERS = 1_000_000
"""Hosts in groups, directly or through other groups."""
FLEET_GROUP = "csdctl_fleet"
"""The group of all nodes of a written inventory."""
LIST_REMEDY = "pass an inventory that `ansible-inventory --list` can read"
_GROUPS_OF_ALL = {"all", "ungrouped", FLEET_GROUP}
_SSH = {"ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh", "ansible.builtin.paramiko_ssh"}
_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")
_SETTINGS = {
    "DEFAULT_REMOTE_USER": "ansible_user",
    "DEFAULT_REMOTE_PORT": "ansible_port",
    "DEFAULT_PRIVATE_KEY_FILE": "ansible_private_key_file",
    "ssh_args": "ansible_ssh_args",
    "ssh_common_args": "ansible_ssh_common_args",
    "ssh_extra_args": "ansible_ssh_extra_args",
}
"""Settings of ansible.cfg, by their names in `ansible-config dump`, and the variables that override them."""

Variables = Mapping[str, Any]


@dataclass(frozen=True)
class _Group:
    hosts: Annotated[list[str], Field(max_length=MAX_HOSTS)] = field(default_factory=list)
    children: Annotated[list[str], Field(max_length=MAX_GROUPS)] = field(default_factory=list)


@dataclass(frozen=True)
class _Meta:
    hostvars: Annotated[dict[str, dict[str, Any]], Field(max_length=MAX_HOSTS)]


@dataclass(frozen=True)
class Inventory:
    """The groups of each host, innermost first, and its variables."""

    name: str
    groups: dict[str, list[str]]
    variables: dict[str, dict[str, Any]]


def parse_inventory(text: str, name: str) -> Inventory:
    """Parse the output of `ansible-inventory --list`. Raises InputError for anything else."""
    content = parse_json_document(text, name, remedy=LIST_REMEDY)
    if not isinstance(content, dict) or "_meta" not in content:
        raise InputError(f"{name} is not output of `ansible-inventory --list`", remedy=LIST_REMEDY)
    if len(content) > MAX_GROUPS:
        raise InputError(f"{name}: {len(content):,} groups, expected at most {MAX_GROUPS:,}")
    variables = check_values(content.pop("_meta"), _Meta, f"{name}: _meta", remedy=LIST_REMEDY).hostvars
    groups = check_values(content, dict[str, _Group], name, remedy=LIST_REMEDY)
    members: dict[str, set[str]] = {}
    for group in groups.keys() - _GROUPS_OF_ALL:
        inner_groups = [group]
        for inner in inner_groups:  # grows during the iteration
            children = groups[inner].children
            inner_groups += [child for child in children if child in groups and child not in inner_groups]
        members[group] = {host for inner in inner_groups for host in groups[inner].hosts}
        if sum(map(len, members.values())) > MAX_MEMBERS:
            raise InputError(f"{name} has more than {MAX_MEMBERS:,} hosts in groups")
    hosts = dict.fromkeys([*(host for group in groups.values() for host in group.hosts), *variables])
    groups_of: dict[str, list[str]] = {host: [] for host in hosts}
    for group in sorted(members, key=lambda group: (len(members[group]), group)):  # innermost first
        for host in members[group]:
            groups_of[host].append(group)
    return Inventory(name, groups_of, variables)


def parse_config(text: str) -> Variables:
    """Parse `ansible-config dump --format json -t all --only-changed` to variables of all hosts."""
    settings: dict[str, Any] = {}
    plugins: list[dict[str, Any]] = []
    for entry in parse_json_document(text, "the output of `ansible-config dump`"):
        plugins += entry.get("CONNECTION_PLUGINS", [])
        settings[entry.get("name")] = entry.get("value")
    for plugin in plugins:
        settings |= {entry["name"]: entry["value"] for entry in plugin.get("ssh", [])}
    return {variable: settings[key] for key, variable in _SETTINGS.items() if settings.get(key)}


def list_targets(
    inventory: Inventory, defaults: Variables, limit: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[list[Target], dict[str, list[str]]]:
    """Return the selected hosts, and warnings with the hosts concerned. Raises InputError."""
    name = inventory.name
    if not inventory.groups:
        raise InputError(f"{name} has no host", remedy="pass the inventory that Ansible uses")
    targets: list[Target] = []
    warnings: dict[str, list[str]] = {}
    for host in select_names(inventory.groups, limit, exclude, where=name):
        variables = {**defaults, **inventory.variables.get(host, {})}
        target, notes = _read_host(host, variables, inventory.groups[host], f"{name}: {host}")
        for note in notes:
            warnings.setdefault(note, []).append(host)
        if target:
            targets.append(target)
    if not targets:
        reasons = "; ".join(f"{format_node_names(hosts)} {note}" for note, hosts in [*warnings.items()][:3])
        raise InputError(f"{name} has no host with SSH access: {reasons}")
    return targets, warnings


def _read_host(
    host: str, variables: Variables, groups: Sequence[str], where: str
) -> tuple[Target | None, list[str]]:
    """Return the target for a host, None for one without SSH, and notes. Raises InputError."""
    connection = _read_text(variables, where, "ansible_connection") or "ssh"
    if connection == "local" or host in {"localhost", HOST_NAME}:
        return None, ["is the host itself: skipped"]
    if connection not in _SSH:
        return None, [f"uses `{connection}`, not SSH: skipped"]
    if not NAME.fullmatch(host):
        remedy = f"use a name of letters, digits, '.', '_', '-': csd0 ansible_host={host}"
        raise InputError(f"{where} is not a valid node name", remedy=remedy)
    address = _read_text(variables, where, "ansible_host", "ansible_ssh_host") or host
    if not ADDRESS.fullmatch(address):
        raise InputError(f"{where}: {address!r} is not a valid {AN_ADDRESS}")
    has_password = not variables.keys().isdisjoint(_PASSWORDS)
    notes = ["uses a password in Ansible; csdctl uses keys"] if has_password else []
    notes += [f"group {name!r} is skipped: not a valid name" for name in groups if not GROUP.fullmatch(name)]
    python = _read_text(variables, where, "ansible_python_interpreter")
    if re.search(r"\s", python):
        notes.append(f"ansible_python_interpreter {python!r} is ignored: not a single program")
    return Target(
        name=host,
        words=(*_read_arguments(variables, where), "--", address),
        groups=tuple(name for name in groups if GROUP.fullmatch(name)),
        python="" if python.startswith("auto") or re.search(r"\s", python) else python,
    ), notes


def _read_text(variables: Variables, where: str, *names: str) -> str:
    """Return the last of `names` that is set, or ''. Raises InputError for templates and lists."""
    name = next((name for name in reversed(names) if name in variables), "")
    value = variables.get(name)
    if isinstance(value, dict) and "__ansible_unsafe" in value:
        value = value["__ansible_unsafe"]
    text = "" if value is None else str(value)
    if isinstance(value, list | dict) or "{{" in text or "{%" in text:
        problem = f"{where}: {name} is a template, a list, or encrypted: {text[:80]!r}"
        raise InputError(problem, remedy="write the value itself")
    return text


def _read_arguments(variables: Variables, where: str) -> tuple[str, ...]:
    """Return the arguments of `ssh` before the address, in Ansible's order: the first of each wins."""
    port = _read_text(variables, where, "ansible_port", "ansible_ssh_port")
    user = _read_text(variables, where, "ansible_user", "ansible_ssh_user")
    key = _read_text(variables, where, "ansible_private_key_file", "ansible_ssh_private_key_file")
    try:
        options = {"-p": port, "-l": user, "-i": key}
        given = [word for option, value in options.items() if value for word in (option, value)]
        general, common, extra = (shlex.split(_read_text(variables, where, name)) for name in _ARGUMENTS)
        return read_arguments([*general, *given, *common, *extra])[0]
    except ValueError as error:
        raise InputError(f"{where}: its arguments of ssh cannot be read: {error}") from None


def render_inventory(fleet: Fleet, ssh_options: Mapping[str, Sequence[str]]) -> str:
    """Return the inventory of `fleet`, with ssh options by node. Raises InputError for a template."""
    hosts = {
        node.name: _write_variables(node, ssh_options[node.name])
        | {"node_network": ",".join(fleet.networks_of(node.name))}
        for node in fleet.nodes
    }
    groups: Variables = {
        name: {"hosts": {node.name: {} for node in fleet.nodes if name in node.groups}}
        for name in dict.fromkeys(name for node in fleet.nodes for name in node.groups)
    }
    # Variables of a group would change the hosts of other inventories that Ansible reads beside this one.
    tree = {FLEET_GROUP: {"hosts": hosts, "children": groups}}
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1 << 20)
    source = " ".join(str(fleet.path).split())
    return f"# Written by `csdctl inventory --format ansible` from {source}.\n{text}"


def _write_variables(node: Node, ssh_options: Sequence[str]) -> dict[str, object]:
    variables: dict[str, object] = {
        "ansible_host": node.address,
        "ansible_port": node.port,
        "ansible_user": node.user,
        "ansible_python_interpreter": node.python,
        "ansible_ssh_common_args": shlex.join(ssh_options),
        # Ansible's own path has neither jump host nor key: nodes of two servers may share an address.
        "ansible_control_path": f"%(directory)s/{hashlib.sha256(repr(node).encode()).hexdigest()[:10]}",
    }
    if node.key:
        variables["ansible_ssh_private_key_file"] = str(node.key.absolute())
    if node.state:
        variables["node_state"] = node.state
    for key, value in variables.items():
        if isinstance(value, str) and any(sign in value for sign in ("{{", "{%", "{#")):
            problem = f"{key} of {node.name} would be interpreted by Ansible as a template: {value!r}"
            raise InputError(problem, remedy="rename the path")
    return variables
