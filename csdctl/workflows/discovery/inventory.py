"""Render the fleet for other programs: Ansible, OpenSSH."""

from collections.abc import Callable, Mapping
from pathlib import Path

from csdctl.fleet.ansible.writing import render_inventory
from csdctl.fleet.model import Fleet
from csdctl.transport.many import fleet_known_hosts_paths
from csdctl.transport.ssh_config import build_ssh_config, build_ssh_options


def render_ansible(fleet: Fleet, directory: Path) -> str:
    """Return an inventory for `ansible-playbook -i`, with csdctl's known_hosts files for `directory`."""
    known_hosts = fleet_known_hosts_paths(fleet, directory)
    return render_inventory(fleet, {node.name: build_ssh_options(node, known_hosts) for node in fleet.nodes})


def render_ssh_config(fleet: Fleet, directory: Path) -> str:
    """Return a file for `ssh -F`, with an alias for each node and the same known_hosts files."""
    return build_ssh_config(fleet.nodes, fleet_known_hosts_paths(fleet, directory))


TEXT_FORMATS: Mapping[str, Callable[[Fleet, Path], str]] = {
    "ansible": render_ansible,
    "ssh-config": render_ssh_config,
}
