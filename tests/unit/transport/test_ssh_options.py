"""Options for the ssh of other programs: OpenSSH, and Ansible if installed, against a real socket."""

import os
import subprocess
from pathlib import Path

import asyncssh
import pytest

from csdctl.fleet.ansible import render_inventory
from csdctl.fleet.model import Fleet, Node
from csdctl.fleet.openssh import build_ssh_options, parse_proxy_command
from tests.needs import find_ansible
from tests.unit.transport.conftest import SshServer


def ssh(server: SshServer, node: Node) -> subprocess.CompletedProcess[str]:
    options = build_ssh_options(node, [server.known_hosts])
    words = ["ssh", "-F", "none", *options, "-p", str(node.port), "-l", node.user, "-i", str(node.key)]
    return subprocess.run([*words, node.address, "pwd"], capture_output=True, text=True, check=False)


def test_openssh_connects_with_these_options(server: SshServer) -> None:
    ended = ssh(server, server.node())
    assert ended.stdout == f"{server.home}\n", ended.stderr


@pytest.mark.fault(5)
def test_changed_host_key_is_refused(server: SshServer) -> None:
    server.trust(asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode())
    ended = ssh(server, server.node())
    assert ended.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ended.stderr


def test_jump_hosts_get_their_own_key_and_the_same_known_hosts(tmp_path: Path) -> None:
    outer = Node("outer", "fd00::9", user="me", key=Path("/keys/100% my id"))
    gate = Node("gate", "10.9.0.1", 2200, "ops", jump=outer)
    options = build_ssh_options(Node("csd0", "10.0.0.1", jump=gate), [tmp_path / "known hosts"])
    (command,) = (word.removeprefix("ProxyCommand=") for word in options if word.startswith("ProxyCommand="))
    found = parse_proxy_command(command)
    assert found is not None
    host, arguments = found
    assert host == "10.9.0.1"
    assert arguments[:4] == ("-p", "2200", "-l", "ops")
    assert command.count(f'UserKnownHostsFile="{tmp_path}/known hosts"') == 2
    (inner,) = (word.removeprefix("ProxyCommand=") for word in arguments if word.startswith("ProxyCommand="))
    again = parse_proxy_command(inner)
    assert again is not None
    assert again[0] == "fd00::9"
    assert 'IdentityFile="/keys/100%% my id"' in again[1]


@pytest.mark.needs("ansible")
@pytest.mark.parametrize("name", ["hosts", "hosts.yml"])
def test_ansible_connects_with_the_inventory(server: SshServer, tmp_path: Path, name: str) -> None:
    node = server.node()
    fleet = Fleet((node,), path=tmp_path / "fleet.yaml")
    options = {node.name: build_ssh_options(node, [server.known_hosts])}
    (tmp_path / name).write_text(render_inventory(fleet, options))
    ended = subprocess.run(
        [str(find_ansible("ansible")), "-i", name, "csd0", "-m", "ansible.builtin.raw", "-a", "pwd"],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_SSH_ARGS": "-o ControlMaster=no", "ANSIBLE_PIPELINING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(server.home) in ended.stdout, ended.stdout + ended.stderr
