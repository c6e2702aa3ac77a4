"""Configuration and options for the ssh of other programs: OpenSSH, and Ansible if installed."""

import os
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import asyncssh
import pytest

from csdctl.errors import InputError
from csdctl.fleet.ansible import render_inventory
from csdctl.fleet.model import Fleet, Node
from csdctl.fleet.openssh import build_ssh_config, build_ssh_options, parse_proxy_command
from tests.needs import find_ansible
from tests.unit.transport.conftest import SshServer

NODES = (
    Node("csd0", "10.1.2.3", user="root", key=Path("/keys/id ed25519")),
    Node("csd1", "fe80::1%eth0", port=2222, user="trainer"),
    *(
        Node(name, "10.9.0.2", jump=Node("gate", "10.0.0.1", user="admin", jump=Node("outer", "10.0.0.9")))
        for name in ("csd2", "csd3")
    ),
)
KNOWN_HOSTS = (Path("/project dir/.csdctl/known_hosts"), Path("/home/me/100%/known_hosts"))


@pytest.mark.needs("ssh")
def test_ssh_parses_the_config_as_intended(tmp_path: Path) -> None:
    path = tmp_path / "ssh_config"
    path.write_text(build_ssh_config(NODES, KNOWN_HOSTS))

    def ask(alias: str) -> dict[str, str]:
        command = ["ssh", "-G", "-F", path, alias]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return dict(line.split(" ", 1) for line in printed.splitlines() if " " in line)

    first, second = ask("csd0"), ask("csd1")
    assert (first["hostname"], first["port"], first["user"]) == ("10.1.2.3", "22", "root")
    assert first["identityfile"] == "/keys/id ed25519"
    assert first["identitiesonly"] == "yes"
    assert (second["hostname"], second["port"], second["user"]) == ("fe80::1%eth0", "2222", "trainer")
    assert second["identitiesonly"] == "no"
    for config in (first, second):
        assert config["stricthostkeychecking"] == "true"
        assert config["batchmode"] == "yes"
        assert "/project dir/.csdctl/known_hosts" in config["userknownhostsfile"]


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a${HOME}b", "a\\b"])
def test_paths_that_ssh_config_cannot_represent_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="ssh_config"):
        build_ssh_config([Node("csd0", "10.1.2.3", key=Path("/keys") / name)], KNOWN_HOSTS)


@pytest.mark.fault(5)
def test_openssh_connects_with_these_options_unless_the_host_key_has_changed(server: SshServer) -> None:
    node = server.node()
    options = build_ssh_options(node, [server.known_hosts])
    words = ["ssh", "-F", "none", *options, "-p", str(node.port), "-l", node.user, "-i", str(node.key)]
    ssh = partial(subprocess.run, [*words, node.address, "pwd"], capture_output=True, text=True, check=False)
    ended = ssh()
    assert ended.stdout == f"{server.home}\n", ended.stderr
    server.trust(asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode())
    ended = ssh()
    assert ended.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ended.stderr


def test_jump_hosts_get_their_own_key_and_the_same_known_hosts(tmp_path: Path) -> None:
    def proxy_of(words: Iterable[str]) -> tuple[str, tuple[str, ...]]:
        (command,) = (word[13:] for word in words if word.startswith("ProxyCommand="))
        parsed = parse_proxy_command(command)
        assert parsed is not None
        return command, parsed

    outer = Node("outer", "fd00::9", user="me", key=Path("/keys/100% my id"))
    gate = Node("gate", "10.9.0.1", 2200, "ops", jump=outer)
    options = build_ssh_options(Node("csd0", "10.0.0.1", jump=gate), [tmp_path / "known hosts"])
    command, words = proxy_of(options)
    assert words[:4] == ("-p", "2200", "-l", "ops")
    assert words[-2:] == ("--", "10.9.0.1")
    assert command.count(f'UserKnownHostsFile="{tmp_path}/known hosts"') == 2
    _, words = proxy_of(words)
    assert words[-1] == "fd00::9"
    assert 'IdentityFile="/keys/100%% my id"' in words


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
