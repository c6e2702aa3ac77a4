"""Hosts of an Ansible inventory as OpenSSH targets, and a fleet as an Ansible inventory.

An inventory is read as `ansible-inventory --list` prints it: Ansible itself knows all formats, the precedence
of variables, plugins and vaults.
"""

import configparser
import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass

from csdctl.documents import check_values, load_json, load_text
from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, Node, select_names
from csdctl.fleet.names import GROUP, NAME, format_node_names
from csdctl.fleet.openssh import Target, read_arguments
from csdctl.notify import shorten

MAX_HOSTS = 10_000
MAX_GROUPS = 1000
MAX_MEMBERS = 1_000_000
"""Hosts in groups, directly or through other groups."""

_SSH = {"ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh", "ansible.builtin.paramiko_ssh"}
_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
FLEET_GROUP = "csdctl_fleet"
"""The group of all nodes of a written inventory."""
_OF_ALL = {"all", "ungrouped", FLEET_GROUP}
_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")


_CONFIG = {
    ("defaults", "remote_user"): "ansible_user",
    ("defaults", "remote_port"): "ansible_port",
    ("defaults", "private_key_file"): "ansible_private_key_file",
    ("ssh_connection", "ssh_args"): "ansible_ssh_args",
    ("ssh_connection", "ssh_common_args"): "ansible_ssh_common_args",
    ("ssh_connection", "ssh_extra_args"): "ansible_ssh_extra_args",
}

Variables = Mapping[str, Any]


@dataclass(frozen=True)
class _Group:
    """A group as `ansible-inventory --list` prints it."""

    hosts: Annotated[list[str], Field(max_length=MAX_HOSTS)] = Field(default_factory=list)
    children: Annotated[list[str], Field(max_length=MAX_GROUPS)] = Field(default_factory=list)


@dataclass(frozen=True)
class _Meta:
    """Its variables of all hosts."""

    hostvars: Annotated[dict[str, dict[str, Any]], Field(max_length=MAX_HOSTS)]


@dataclass(frozen=True)
class Inventory:
    """The groups of each host, innermost first, and its variables."""

    name: str
    groups: dict[str, list[str]]
    variables: dict[str, dict[str, Any]]


def load_inventory(path: Path) -> Inventory:
    """Read the output of `ansible-inventory --list`. Raises InputError for anything else."""
    remedy = f"run `ansible-inventory -i {path} --list > listed.json` and pass that file"
    if not path.exists():
        raise InputError(f"{path} does not exist", remedy="pass the path of an existing file")
    content = load_json(path, remedy=remedy)
    if not isinstance(content, dict) or "_meta" not in content:
        raise InputError(f"{path} is not output of `ansible-inventory --list`", remedy=remedy)
    variables = check_values(content.pop("_meta"), _Meta, f"{path}: _meta", remedy=remedy).hostvars
    if len(content) > MAX_GROUPS:
        raise InputError(f"{path}: {len(content):,} groups, expected at most {MAX_GROUPS:,}")
    groups = check_values(content, dict[str, _Group], str(path), remedy=remedy)
    names = [name for group in groups.values() for name in group.hosts]
    found: dict[str, list[str]] = {name: [] for name in (*names, *variables)}
    members: dict[str, set[str]] = {}
    for name in groups:
        members[name] = {host for inner in _below(name, groups) for host in groups[inner].hosts}
        if sum(map(len, members.values())) > MAX_MEMBERS:
            raise InputError(f"{path} has more than {MAX_MEMBERS:,} hosts in groups")
    for name in sorted(members.keys() - _OF_ALL, key=lambda name: (len(members[name]), name)):
        for host in members[name]:
            found[host].append(name)
    return Inventory(str(path), found, variables)


def _below(name: str, groups: Mapping[str, _Group]) -> set[str]:
    """Return the group and those inside of it."""
    found, pending = {name}, [name]
    while pending:
        for child in groups[pending.pop()].children:
            if child in groups and child not in found:
                found.add(child)
                pending.append(child)
    return found


def load_config(directory: Path, environment: Mapping[str, str] = os.environ) -> Variables:
    """Return the variables of the first ansible.cfg that Ansible finds in `directory`. Raises InputError."""
    named = environment.get("ANSIBLE_CONFIG")
    candidates = [Path(named)] if named else []
    candidates += [directory, Path.home() / ".ansible.cfg", Path("/etc/ansible/ansible.cfg")]
    files = [path / "ansible.cfg" if path.is_dir() else path for path in candidates]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        return {}
    parser = configparser.ConfigParser(inline_comment_prefixes=(";",), interpolation=None, strict=False)
    try:
        parser.read_string(load_text(path), source=str(path))
    except configparser.Error as error:
        problem = shorten(" ".join(str(error).split()), 500)  # it lists every line that it cannot read
        raise InputError(f"{path} cannot be read: {problem}") from None
    found = {
        variable: parser[section][key]
        for (section, key), variable in _CONFIG.items()
        if parser.has_option(section, key) and parser[section][key]
    }
    key = found.get("ansible_private_key_file", "/")
    if not key.startswith(("/", "~", "{")):  # relative to its file
        found["ansible_private_key_file"] = str(path.absolute().parent / key)
    return found


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
        settings = _HostVariables({**defaults, **inventory.variables.get(host, {})}, host, name)
        target, notes = _target(settings, host, inventory.groups[host])
        for note in notes:
            warnings.setdefault(note, []).append(host)
        if target:
            targets.append(target)
    if not targets:
        reasons = "; ".join(f"{format_node_names(hosts)} {note}" for note, hosts in [*warnings.items()][:3])
        raise InputError(f"{name} has no host with SSH access: {reasons}")
    return targets, warnings


def _target(settings: "_HostVariables", host: str, groups: Sequence[str]) -> tuple[Target | None, list[str]]:
    connection = settings.text("ansible_connection") or "ssh"
    if connection == "local" or host in {"localhost", "host"}:
        return None, ["is the host itself: skipped"]
    if connection not in _SSH:
        return None, [f"uses `{connection}`, not SSH: skipped"]
    if not NAME.fullmatch(host):
        remedy = f"use a name of letters, digits, '.', '_', '-': csd0 ansible_host={host}"
        raise InputError(f"{settings.where} is not a valid node name", remedy=remedy)
    has_password = not settings.variables.keys().isdisjoint(_PASSWORDS)
    notes = ["uses a password in Ansible; csdctl uses keys"] if has_password else []
    notes += [f"group {name!r} is skipped: not a valid name" for name in groups if not GROUP.fullmatch(name)]
    python = settings.text("ansible_python_interpreter")
    if re.search(r"\s", python):
        notes.append(f"ansible_python_interpreter {python!r} is ignored: not a single program")
    usable = "" if python.startswith("auto") or re.search(r"\s", python) else python
    address = settings.text("ansible_host", "ansible_ssh_host") or host
    valid = tuple(name for name in groups if GROUP.fullmatch(name))
    return Target(host, address, settings.arguments(), valid, usable), notes


class _HostVariables:
    def __init__(self, variables: Variables, host: str, source: str) -> None:
        self.variables = variables
        self.where = f"{source}: {host}"

    def text(self, *names: str) -> str:
        """Return the last of `names` that is set, or ''. Raises InputError for templates and lists."""
        name = next((name for name in reversed(names) if name in self.variables), "")
        value = self.variables.get(name)
        if isinstance(value, dict) and "__ansible_unsafe" in value:
            value = value["__ansible_unsafe"]
        text = "" if value is None else str(value)
        if isinstance(value, list | dict) or "{{" in text or "{%" in text:
            problem = f"{self.where}: {name} is a template, a list, or encrypted: {text[:80]!r}"
            raise InputError(problem, remedy="write the value itself")
        return text

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of `ssh` before the address, in Ansible's order: the first of each wins."""
        own = [
            *(("-p", port) if (port := self.text("ansible_port", "ansible_ssh_port")) else ()),
            *(("-l", user) if (user := self.text("ansible_user", "ansible_ssh_user")) else ()),
        ]
        if key := self.text("ansible_private_key_file", "ansible_ssh_private_key_file"):
            own += ["-i", key]
        texts = [self.text(name) for name in _ARGUMENTS]
        try:
            words = [shlex.split(text) for text in texts]
            return read_arguments([*words[0], *own, *words[1], *words[2]])[0]
        except ValueError as error:
            raise InputError(f"{self.where}: its arguments of ssh cannot be read: {error}") from None


def render_inventory(fleet: Fleet, ssh_options: Mapping[str, Sequence[str]]) -> str:
    """Return the inventory of `fleet`, with ssh options by node. Raises InputError for a template."""
    hosts = {
        node.name: _variables(node, ssh_options[node.name])
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


def _variables(node: Node, ssh_options: Sequence[str]) -> dict[str, object]:
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
