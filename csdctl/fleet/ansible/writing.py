"""Render a fleet as an Ansible inventory; pure.

The format is YAML, which Ansible reads from files without extension, with .yml or .yaml, and from a pipe.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

import yaml

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, Node


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
