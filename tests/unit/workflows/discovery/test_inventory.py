"""Nodes from Ansible inventories and ssh_config, resolved by the real `ssh -G`, and the file for them."""

import contextlib
import getpass
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from csdctl.errors import InputError, NoNodeReachableError
from csdctl.fleet import openssh
from csdctl.fleet.ansible import parse_inventory
from csdctl.fleet.fleet_file import load_fleet
from csdctl.fleet.model import Fleet, Node
from csdctl.workflows.discovery import inventory
from csdctl.workflows.discovery.inventory import (
    FoundFleet,
    NodeSource,
    ansible_inventory,
    expand_addresses,
    import_fleet,
    load_inventory,
    render_ansible,
    render_ssh_config,
    scan,
    ssh_config,
)
from tests.patience import scaled

INVENTORIES = Path(__file__).parents[2] / "fleet" / "inventories"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "keys" / "id of csd0"
    path.parent.mkdir()
    path.write_text("")
    return path


def find(source: NodeSource, directory: Path, limit: tuple[str, ...] = ()) -> FoundFleet:
    return import_fleet(source, directory / "fleet.yaml", directory=directory, limit=limit, is_dry_run=True)


def from_ssh(directory: Path, text: str, *, limit: tuple[str, ...] = ()) -> FoundFleet:
    path = directory / "config"
    path.write_text(text)
    return find(ssh_config(path), directory, limit)


def from_ansible(directory: Path, **hosts: dict[str, object]) -> FoundFleet:
    path = directory / "hosts"
    groups = {"csds": {"hosts": list(hosts)}}
    path.write_text(json.dumps({"_meta": {"hostvars": hosts}, **groups}))
    return find(ansible_inventory(path), directory)


class TestSshConfig:
    def test_aliases_are_resolved_by_ssh(self, tmp_path: Path, key: Path) -> None:
        text = (
            f'Match host csd0\n  IdentityFile "{key.parent}/id of %n"\n'
            "Host csd0 csd1\n  HostName=%h.lan\n  User trainer\nHost csd1\n  Port 2200\n"
            "Host *\n  User nobody\n  Port 22\n"
        )
        imported = from_ssh(tmp_path, text)
        assert imported.fleet.nodes == (
            Node("csd0", "csd0.lan", user="trainer", key=key, offers_agent=True),
            Node("csd1", "csd1.lan", port=2200, user="trainer"),
        )
        assert imported.warnings == ()

    def test_all_keys_that_ssh_offers_are_taken_in_its_order(self, tmp_path: Path, key: Path) -> None:
        here, user = key.parent, getpass.getuser()
        names = ["first", f"{user}-10.0.0.1", "in the agent.pub", "last"]
        for name in names:
            (here / name).write_text("")
        text = (
            f'Host csd0\n  HostName 10.0.0.1\n  IdentityFile "{here}/first"\n  IdentityFile {here}/%u-%h\n'
            f'  IdentityFile /nowhere\nMatch host 10.0.0.1\n  IdentityFile "{here}/in the agent.pub"\n'
            f"Host *\n  User u\n  IdentityFile {here}/last\n"
        )
        [node] = from_ssh(tmp_path, text).fleet.nodes
        assert node.keys == tuple(here / name.removesuffix(".pub") for name in names)
        assert node.offers_agent
        [node] = from_ssh(tmp_path, f"{text}  IdentitiesOnly yes\n").fleet.nodes
        assert not node.offers_agent

    def test_included_files_are_read_and_patterns_are_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "a").write_text("hOsT inside\n  hostname 10.0.0.7\n  User u\n")
        text = f'Include "{tmp_path}/more/*"\nHost a* !b "two words" c # d\n  HostName 10.0.0.8\n  User u\n'
        imported = from_ssh(tmp_path, text)
        assert [(node.name, node.address) for node in imported.fleet.nodes] == [
            ("c", "10.0.0.8"),
            ("inside", "10.0.0.7"),
        ]
        assert imported.warnings == ("two words: not a valid node name: skipped",)

    def test_jump_hosts_are_followed(self, tmp_path: Path) -> None:
        text = (
            "Host csd0\n  ProxyJump ops@gate:2200\nHost csd1\n  ProxyJump first,second\n"
            "Host csd2\n  ProxyCommand ssh -q -W [%h]:%p -l x -p 23 last\n"
            "Host gate\n  HostName 10.0.0.1\n  ProxyJump first\nHost *\n  User u\n"
        )
        imported = from_ssh(tmp_path, text, limit=("csd*",)).fleet
        first = Node("first", "first", user="u")
        assert [node.jump for node in imported.nodes] == [
            Node("ops-gate-2200", "10.0.0.1", 2200, "ops", jump=first),
            Node("second", "second", user="u", jump=first),
            Node("last", "last", 23, "x"),
        ]
        imported = from_ssh(tmp_path, "Host csd0\n  ProxyJump gate\nHost gate\n")
        assert any(
            warning.startswith("gate: jump host of others; it becomes a node")
            for warning in imported.warnings
        )

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("HostKeyAlias x", "hostkeyalias x is ignored"),
            ("IdentityFile /nowhere/id", "IdentityFile /nowhere/id does not exist"),
            ("BindInterface tun0", "bindinterface tun0 is ignored"),
            ("IdentityFile none", "the agent and the default keys are used"),
            ("RevokedHostKeys /r", "revokedhostkeys /r is ignored"),
        ],
    )
    def test_ignored_settings_are_reported_once_for_all_nodes(
        self, tmp_path: Path, line: str, expected: str
    ) -> None:
        imported = from_ssh(tmp_path, f"Host csd0 csd1 csd2\n  User u\n  {line}\n")
        (warning,) = imported.warnings
        assert warning.startswith("csd0, csd1, csd2: ")
        assert expected in warning

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "no Host line with a name"),
            ("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n", "cycle"),
            ("Host csd0\n  ProxyCommand nc %h %p\n", "csd0: ProxyCommand 'nc %h %p' is not supported"),
            ("Host csd0\n  HostName -oProxyCommand=x\n", "csd0: "),
            ("Host csd0\n  HostName fe80::1\n", "csd0: 'fe80::1' is not .* needs its interface"),
            ("Host csd0\n  ProxyJump [fe80::1]:22\n", "csd0: .* needs its interface"),
            ("Host csd0\n  ProxyJump $(x)@y\n", "csd0: "),
        ],
    )
    @pytest.mark.fault(40)
    def test_what_a_fleet_file_cannot_have_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            from_ssh(tmp_path, f"{text}  User u\n" if "User" not in text and text else text)


@pytest.fixture
def without_ansible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "find_program", lambda name: "")


@pytest.mark.needs("ansible")
class TestAnsibleItself:
    @pytest.mark.parametrize("name", ["ranges.ini", "tree.yml", "with_vars/hosts", "bare"])
    def test_inventory_is_listed_as_captured(self, tmp_path: Path, name: str) -> None:
        hosts, config, warnings = load_inventory(INVENTORIES / name, tmp_path)
        captured = parse_inventory((INVENTORIES / f"{name}.list.json").read_text(), hosts.name)
        assert (hosts, config) == (captured, {})
        assert warnings == (["Found duplicate mapping key 'site'."] if name == "tree.yml" else [])

    def test_ansible_cfg_gives_defaults_or_is_an_error(self, tmp_path: Path, key: Path) -> None:
        (tmp_path / "ansible.cfg").write_text(
            "[defaults]\nremote_user = cfg ; a comment\nprivate_key_file = keys/id of csd0\n"
            "[ssh_connection]\nssh_args = -C -o ControlMaster=auto\nssh_common_args = -J gate\n"
        )
        path = tmp_path / "hosts"
        path.write_text("csd0\ncsd1 ansible_ssh_user=own ansible_ssh_common_args=\n")
        nodes = find(ansible_inventory(path), tmp_path).fleet.nodes
        assert [(node.user, node.key, node.jump and node.jump.name) for node in nodes] == [
            ("cfg", key, "gate"),
            ("own", key, None),
        ]
        (tmp_path / "ansible.cfg").write_text("[defaults\n")
        with pytest.raises(InputError, match=r"`ansible-.*` failed: .*ansible\.cfg"):
            find(ansible_inventory(path), tmp_path)

    def test_inventory_that_ansible_cannot_read_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "hosts.yml"
        path.write_text("all: [csd0]\n")
        with pytest.raises(InputError, match=r"hosts\.yml has no host: .*not a valid group"):
            find(ansible_inventory(path), tmp_path)


@pytest.mark.usefixtures("without_ansible")
class TestAnsible:
    def test_inventory_without_ansible_is_an_error_with_what_to_install(self, tmp_path: Path) -> None:
        path = tmp_path / "hosts.ini"
        path.write_text("[csds]\ncsd[0:3]\n")
        with pytest.raises(InputError, match="`ansible-inventory` is needed to read") as raised:
            find(ansible_inventory(path), tmp_path)
        assert "install ansible-core: pip install" in raised.value.remedy
        assert "ansible-inventory -i" in raised.value.remedy

    def test_ansible_cfg_without_ansible_is_ignored_with_a_warning(self, tmp_path: Path) -> None:
        (tmp_path / "ansible.cfg").write_text("[defaults]\nremote_user = cfg\n")
        assert from_ansible(tmp_path, csd0={"ansible_user": "me"}).warnings == (
            "ansible.cfg is ignored: Ansible is not installed here",
        )

    @pytest.mark.fault(40)
    def test_address_that_is_an_option_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="csd0: '-oProxyCommand=x' is not a valid address"):
            from_ansible(tmp_path, csd0={"ansible_host": "-oProxyCommand=x"})

    @pytest.mark.parametrize("option", ["Match exec 'touch ran'", "Match=exec 'touch ran'", "Include config"])
    def test_arguments_of_an_inventory_run_no_program(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
    ) -> None:
        """They write no file either, and name no other machine."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "config").write_text("Match exec 'touch ran'\n")
        words = f'-o "{option}" -E log -O exit other.example'
        imported = from_ansible(tmp_path, csd0={"ansible_user": "me", "ansible_ssh_extra_args": words})
        assert [(node.user, node.address) for node in imported.fleet.nodes] == [("me", "csd0")]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "hosts"]

    def test_unknown_argument_of_ssh_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="csd0: its arguments of ssh cannot be read: option -Z"):
            from_ansible(tmp_path, csd0={"ansible_ssh_extra_args": "-Z"})

    def test_ignored_settings_of_a_jump_host_are_reported_with_its_name(self, tmp_path: Path) -> None:
        command = "-o 'ProxyCommand=ssh -o HostKeyAlias=x -W %h:%p gate'"
        hosts = {f"csd{number}": {"ansible_ssh_common_args": command} for number in range(10)}
        assert from_ansible(tmp_path, **hosts).warnings == (
            "csd[0-9]: jump host gate: hostkeyalias x is ignored",
        )

    def test_ssh_is_asked_once_for_a_jump_host_of_several_nodes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queried = list[tuple[str, ...]]()

        def query(words: tuple[str, ...]) -> openssh.SshSettings:
            queried.append(words)
            return original(words)

        original = inventory._query
        monkeypatch.setattr(inventory, "_query", query)
        monkeypatch.setattr(inventory.os, "cpu_count", lambda: 1)
        command = "-o 'ProxyJump=gate'"
        from_ansible(tmp_path, **{f"csd{n}": {"ansible_ssh_common_args": command} for n in range(3)})
        assert sum("gate" in words for words in queried) == 1


class TestThereAndBack:
    @pytest.fixture
    def fleet(self, tmp_path: Path, key: Path) -> Fleet:
        outer = Node("outer", "fd00::9", user="me", key=key)
        gate = Node("gate", "10.9.0.1", 2200, "ops", jump=outer)
        keys = {"key": key, "other_keys": (key.with_name("other"),), "offers_agent": True}
        key.with_name("other").write_text("")
        nodes = [Node(f"csd{k}", f"10.1.1.{k}", user="t", jump=gate, **keys) for k in range(3)]
        nodes.append(Node("board", "fe80::1%eth0", 23, "b", python="/opt/py", groups=("x", "boards")))
        path = tmp_path / "fleet.yaml"
        path.write_text("")
        return Fleet(tuple(nodes), path=path)

    @pytest.mark.usefixtures("without_ansible")
    def test_ansible_inventory_gives_the_same_nodes_again(self, tmp_path: Path, fleet: Fleet) -> None:
        groups = yaml.safe_load(render_ansible(fleet, tmp_path))["csdctl_fleet"]
        members = {name: {"hosts": list(group["hosts"])} for name, group in groups["children"].items()}
        path = tmp_path / "hosts"
        path.write_text(json.dumps({"_meta": {"hostvars": groups["hosts"]}, **members}))
        again = find(ansible_inventory(path), tmp_path)
        assert again.warnings == ()
        written = {node.name: described(node) for node in fleet.nodes}
        assert {node.name: described(node) for node in again.fleet.nodes} == written
        fleet.path.write_text(again.text)
        assert {node.name: described(node) for node in load_fleet(fleet.path).nodes} == written

    def test_ssh_config_gives_the_same_nodes_again(self, tmp_path: Path, fleet: Fleet) -> None:
        again = from_ssh(tmp_path, render_ssh_config(fleet, tmp_path), limit=("csd*,board",)).fleet
        assert [described(replace(node, python="", groups=())) for node in again.nodes] == [
            described(replace(node, python="", groups=())) for node in fleet.nodes
        ]

    def test_path_that_ansible_would_read_as_a_template_is_rejected(self, tmp_path: Path) -> None:
        fleet = Fleet((Node("csd0", "10.0.0.1", key=Path("/keys/{{ x }}")),))
        with pytest.raises(InputError, match="as a template"):
            render_ansible(fleet, tmp_path)


def described(node: Node | None) -> tuple[object, ...] | None:
    """A node without what a jump host's name and group order are."""
    if node is None:
        return None
    keys = (*node.keys, node.offers_agent)
    values = (node.address, node.port, node.user, keys, node.python, set(node.groups))
    return (*values, described(node.jump))


def test_fleet_is_written_unless_it_exists_or_the_run_is_dry(tmp_path: Path) -> None:
    nodes = (Node("csd0", "10.0.0.1"), Node("csd1", "10.0.0.2"))
    path = tmp_path / "fleet.yaml"
    source = NodeSource("two nodes", "Written by a test", lambda *_: (nodes, ()))
    assert "csd[0-1]" in import_fleet(source, path, directory=tmp_path, is_dry_run=True).text
    assert not path.exists()
    path.touch()
    unread = NodeSource("two nodes", "Written by a test", lambda *given: pytest.fail("it was read"))
    with pytest.raises(InputError, match=r"fleet\.yaml already exists"):
        import_fleet(unread, path, directory=tmp_path)
    imported = import_fleet(source, path, directory=tmp_path, force=True)
    assert path.read_text() == imported.text
    assert [node.name for node in load_fleet(path).nodes] == ["csd0", "csd1"]


@contextlib.contextmanager
def listening(greetings: dict[str, bytes]) -> Iterator[int]:
    """Listen on one port of several loopback addresses, each with its banner (b'' sends none)."""

    def greet(server: socket.socket, greeting: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.sendall(greeting)
                if greeting:
                    connection.close()

    with contextlib.ExitStack() as stack:
        port = 0
        for address, greeting in greetings.items():
            server = stack.enter_context(socket.create_server((address, port)))
            port = server.getsockname()[1]
            threading.Thread(target=greet, args=(server, greeting), daemon=True).start()
            stack.callback(server.shutdown, socket.SHUT_RDWR)
        yield port


def test_scan_finds_ssh_servers_only() -> None:
    ssh, other = b"SSH-2.0-a\r\n", b"HTTP/1.1 400\r\n"
    with listening({"127.0.9.1": ssh, "127.0.9.3": ssh, "127.0.9.4": other, "127.0.9.5": b""}) as port:
        nodes = scan(
            ["127.0.9.0/29"], user="trainer", key=Path("/key"), port=port, banner_timeout_s=scaled(1.5)
        )
    assert [(node.name, node.address) for node in nodes] == [("csd0", "127.0.9.1"), ("csd1", "127.0.9.3")]
    assert {(node.user, node.key, node.port) for node in nodes} == {("trainer", Path("/key"), port)}
    with listening({"127.0.0.1": ssh}) as port, pytest.raises(NoNodeReachableError):
        scan(["127.0.0.1/32"], user="root", port=port)  # this machine


@pytest.mark.parametrize(
    ("cidr", "addresses"),
    [
        ("10.1.2.9/30", ["10.1.2.9", "10.1.2.10"]),
        ("10.1.2.4/31", ["10.1.2.4", "10.1.2.5"]),
        ("10.1.2.4", ["10.1.2.4"]),
        ("fd00::/126", ["fd00::1", "fd00::2", "fd00::3"]),
    ],
)
def test_network_expands_to_its_host_addresses(cidr: str, addresses: list[str]) -> None:
    assert expand_addresses(cidr) == addresses


@pytest.mark.parametrize("cidr", ["", "10.0.0.0/33", "-oProxyCommand=x", "10.0.0.0/19", "fd00::/64"])
def test_what_is_no_small_network_is_refused(cidr: str) -> None:
    with pytest.raises(InputError, match="not an address range|at most 4096"):
        expand_addresses(cidr)
