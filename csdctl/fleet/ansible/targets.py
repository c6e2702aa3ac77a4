"""Hosts of an Ansible inventory as OpenSSH targets, and a fleet as an Ansible inventory; pure."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

import yaml

from csdctl.errors import InputError
from csdctl.fleet.ansible.inventory import ALL, UNGROUPED, Inventory, Value, Variables
from csdctl.fleet.ansible.reading import Vaulted
from csdctl.fleet.model import Fleet, Node, select_names
from csdctl.fleet.names import GROUP, NAME
from csdctl.fleet.openssh import Target, quote_value, read_arguments

_SSH = {"ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh", "ansible.builtin.paramiko_ssh"}
_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")
_LOCAL = {"localhost", "host"}


def list_targets(
    inventory: Inventory, name: str, limit: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[list[Target], dict[str, list[str]]]:
    """Return the hosts selected by `limit` and `exclude`, and warnings with the hosts concerned.

    Raises InputError, with file and line, for a value that only Ansible can evaluate.
    """
    groups = {host: _groups(inventory, host) for host in inventory.hosts}
    if not groups:
        raise InputError(f"{name} has no host", remedy="give the inventory that Ansible uses")
    targets: list[Target] = []
    warnings: dict[str, list[str]] = {message: [] for message in inventory.warnings}
    for host in select_names(groups, limit, exclude, where=name):
        settings = _HostVariables(inventory.defaults | inventory.variables_of(host), host, name)
        target, notes = _target(settings, host, groups[host])
        for note in notes:
            warnings.setdefault(note, []).append(host)
        if target:
            targets.append(target)
    if not targets:
        raise InputError(f"{name} has no host that is reached by SSH")
    return targets, warnings


def _groups(inventory: Inventory, host: str) -> tuple[str, ...]:
    """Return the groups of `host` for `--limit`, innermost first, without `all`."""
    return tuple(name for name in reversed(inventory.groups_of(host)) if name not in (ALL, UNGROUPED))


def _target(
    settings: "_HostVariables", host: str, groups: tuple[str, ...]
) -> tuple[Target | None, list[str]]:
    connection = settings.text("ansible_connection") or "ssh"
    if connection == "local" or host in _LOCAL:
        return None, ["is the host itself: skipped"]
    if connection not in _SSH:
        return None, [f"is reached by `{connection}`, not by SSH: skipped"]
    if not NAME.fullmatch(host):
        raise InputError(
            f"{settings.source}: {host!r} is not a valid node name",
            remedy=f"use a name of letters, digits, '.', '_', '-': csd0 ansible_host={host}",
        )
    notes = ["uses a password in Ansible; csdctl uses keys"] if settings.has(*_PASSWORDS) else []
    notes += [f"group {name!r} is skipped: not a valid name" for name in groups if not GROUP.fullmatch(name)]
    python = settings.text("ansible_python_interpreter")
    if re.search(r"\s", python):
        notes.append(f"ansible_python_interpreter {python!r} is ignored: not a single program")
    usable = "" if python.startswith("auto") or re.search(r"\s", python) else python
    address = settings.text("ansible_host", "ansible_ssh_host") or host
    target = Target(
        name=host,
        host=address,
        arguments=settings.arguments(),
        groups=tuple(name for name in groups if GROUP.fullmatch(name)),
        python=usable,
    )
    return target, notes


class _HostVariables:
    """The variables of one host; if Ansible has several names for a setting, the last wins."""

    def __init__(self, variables: Variables, host: str, source: str) -> None:
        self.source = source
        self._variables = variables
        self._host = host

    def has(self, *names: str) -> bool:
        return any(name in self._variables for name in names)

    def text(self, *names: str) -> str:
        """Return the value as text, or ''; raises InputError for a value that only Ansible can evaluate."""
        for name in reversed(names):
            if name in self._variables:
                return self._usable(name, self._variables[name])
        return ""

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of `ssh` before the address, in Ansible's order: the first of each wins."""
        before, *after = (self._words(name) for name in _ARGUMENTS)
        own: list[str] = []
        if port := self.text("ansible_port", "ansible_ssh_port"):
            own += ["-p", port]
        if user := self.text("ansible_user", "ansible_ssh_user"):
            own += ["-l", user]
        if key := self.text("ansible_private_key_file", "ansible_ssh_private_key_file"):
            own += self._identity(key)
        return (*before, *own, *(word for words in after for word in words))

    def _identity(self, key: str) -> list[str]:
        try:
            return ["-o", f"IdentityFile={quote_value(key)}"]
        except ValueError as error:
            raise InputError(f"{self.source}: private key of {self._host}: {error}") from None

    def _words(self, name: str) -> tuple[str, ...]:
        text = self.text(name)
        try:
            return read_arguments(shlex.split(text)).kept
        except ValueError as error:
            raise InputError(f"{self._where(name)}: {name} {text!r} cannot be read: {error}") from None

    def _usable(self, name: str, value: Value) -> str:
        if isinstance(value.value, list | dict):
            raise InputError(f"{self._where(name)}: {name} of {self._host} is a list or mapping")
        if isinstance(value.value, Vaulted):
            raise self._only_ansible(name, "is encrypted with Ansible Vault")
        text = "" if value.value is None else str(value.value)
        if "{{" in text or "{%" in text:
            raise self._only_ansible(name, f"is a template: {text!r}")
        return text

    def _only_ansible(self, name: str, what: str) -> InputError:
        return InputError(
            f"{self._where(name)}: {name} of {self._host} {what}",
            remedy="write the value itself, or let Ansible evaluate it: run "
            f"`ansible-inventory -i {self.source} --list > inventory.json` and give that file",
        )

    def _where(self, name: str) -> str:
        return self._variables[name].where


def render_inventory(fleet: Fleet, ssh_options: Mapping[str, Sequence[str]]) -> str:
    """Return the inventory of `fleet`; `ssh_options` are the ssh options of each node, by name.

    Raises InputError for a text that Ansible would interpret as a template.
    """
    hosts = {node.name: _variables(node, ssh_options[node.name]) for node in fleet.nodes}
    shared = _usual(list(hosts.values()))
    own = {
        name: {key: value for key, value in variables.items() if shared.get(key) != value}
        for name, variables in hosts.items()
    }
    groups = {name: _members(fleet, name) for node in fleet.nodes for name in node.groups}
    tree = {"all": {"vars": shared, "hosts": own, "children": groups}}
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    source = " ".join(str(fleet.path).split())
    return f"# Written by `csdctl inventory --format ansible` from {source}.\n{text}"


def _variables(node: Node, ssh_options: Sequence[str]) -> dict[str, object]:
    variables: dict[str, object] = {
        "ansible_host": node.address,
        "ansible_port": node.port,
        "ansible_user": node.user,
        "ansible_python_interpreter": node.python,
        "ansible_ssh_common_args": shlex.join(ssh_options),
    }
    if node.key:
        variables["ansible_ssh_private_key_file"] = str(node.key.absolute())
    for key, value in variables.items():
        if isinstance(value, str) and any(sign in value for sign in ("{{", "{%", "{#")):
            raise InputError(
                f"{key} of {node.name} would be interpreted by Ansible as a template: {value!r}",
                remedy="rename the path",
            )
    return variables


def _usual(hosts: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the most common values of variables that all hosts have: hosts can override, but not unset."""
    keys = [key for key in hosts[0] if key != "ansible_host" and all(key in each for each in hosts)]
    return {key: Counter(each[key] for each in hosts).most_common(1)[0][0] for key in keys}


def _members(fleet: Fleet, group: str) -> dict[str, object]:
    return {"hosts": {node.name: {} for node in fleet.nodes if group in node.groups}}


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, for readability."""

    def ignore_aliases(self, data: object) -> bool:
        """Repeat values instead of using aliases."""
        return True
