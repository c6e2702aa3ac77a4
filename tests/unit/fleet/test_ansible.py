"""Ansible inventories are parsed as by Ansible, compared with its captured output in inventories/."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import InputError
from csdctl.fleet.ansible.inventory import Inventory
from csdctl.fleet.ansible.reading import load_inventory
from csdctl.fleet.ansible.targets import list_targets
from csdctl.fleet.openssh import Target
from tests.needs import find_ansible

INVENTORIES = Path(__file__).parent / "inventories"
NAMES = ["ranges.ini", "tree.yml", "with_vars/hosts", "bare"]


def as_ansible_prints(inventory: Inventory) -> dict[str, Any]:
    """Return the parsed inventory in the form of `ansible-inventory --list`, with sets for lists."""
    groups = {
        name: {"hosts": set(group.hosts), "children": set(group.children)}
        for name, group in inventory.groups.items()
    }
    variables = {
        host: {key: value.value for key, value in inventory.variables_of(host).items()}
        for host in inventory.hosts
    }
    return {"groups": groups, "variables": variables}


def as_printed(text: str) -> dict[str, Any]:
    content = json.loads(text)
    meta = content.pop("_meta")
    groups = {
        name: {"hosts": set(entry.get("hosts", ())), "children": set(entry.get("children", ()))}
        for name, entry in content.items()
    }
    return {"groups": groups, "variables": meta["hostvars"]}


def assert_same(ours: Inventory, printed: str) -> None:
    mine, theirs = as_ansible_prints(ours), as_printed(printed)
    for host in ours.hosts:
        assert mine["variables"][host] == theirs["variables"].get(host, {}), host
    for name, group in theirs["groups"].items():
        if name not in ("all", "ungrouped"):
            assert mine["groups"][name] == group, name
    assert set(theirs["variables"]) <= set(ours.hosts)


@pytest.mark.parametrize("name", NAMES)
def test_parsed_inventory_equals_captured_ansible_output(name: str) -> None:
    assert_same(load_inventory(INVENTORIES / name), (INVENTORIES / f"{name}.list.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_captured_ansible_output_equals_the_inventory(name: str) -> None:
    printed = INVENTORIES / f"{name}.list.json"
    again = load_inventory(printed)
    assert_same(again, printed.read_text())
    assert targets(INVENTORIES / name) == targets(printed)


@pytest.mark.needs("ansible")
@pytest.mark.parametrize("name", NAMES)
def test_parsed_inventory_equals_output_of_installed_ansible(name: str) -> None:
    printed = subprocess.run(
        [str(find_ansible("ansible-inventory")), "-i", str(INVENTORIES / name), "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert_same(load_inventory(INVENTORIES / name), printed.stdout)


def targets(path: Path) -> dict[str, Target]:
    return {target.name: target for target in list_targets(load_inventory(path), path.name)[0]}


def read(
    directory: Path, text: str, name: str = "hosts.ini"
) -> tuple[dict[str, Target], dict[str, list[str]]]:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    found, warnings = list_targets(load_inventory(path), str(path))
    return {target.name: target for target in found}, warnings


def refused(directory: Path, text: str, name: str = "hosts.ini") -> InputError:
    with pytest.raises(InputError) as raised:
        read(directory, text, name)
    return raised.value


class TestTargets:
    def test_target_equals_the_ssh_call_of_ansible(self, tmp_path: Path) -> None:
        line = (
            "csd0 ansible_host=10.0.0.1 ansible_port=2200 ansible_user=me ansible_ssh_private_key_file=/k/id "
            "ansible_python_interpreter=/opt/python "
            "ansible_ssh_extra_args='-C -J gw,other -o ForwardAgent=yes'\n"
        )
        found, warnings = read(tmp_path, f"[boards]\n{line}[all_boards:children]\nboards\n")
        assert warnings == {}
        assert found["csd0"] == Target(
            "csd0",
            "10.0.0.1",
            (
                "-p",
                "2200",
                "-l",
                "me",
                "-o",
                'IdentityFile="/k/id"',
                "-J",
                "gw,other",
            ),
            ("boards", "all_boards"),
            "/opt/python",
        )

    def test_arguments_come_in_ansibles_order(self, tmp_path: Path) -> None:
        line = (
            "csd0 ansible_ssh_extra_args=-4 ansible_ssh_common_args=-6 ansible_ssh_args='-p 1' ansible_port=2"
        )
        assert read(tmp_path, line)[0]["csd0"].arguments == ("-p", "1", "-p", "2", "-6", "-4")

    def test_host_itself_and_hosts_without_ssh_are_skipped_with_a_warning(self, tmp_path: Path) -> None:
        text = "csd0\nlocalhost\nserver ansible_connection=local\nswitch ansible_connection=network_cli\n"
        found, warnings = read(tmp_path, text)
        assert list(found) == ["csd0"]
        assert warnings == {
            "is the host itself: skipped": ["localhost", "server"],
            "is reached by `network_cli`, not by SSH: skipped": ["switch"],
        }

    def test_passwords_and_unusable_interpreters_are_reported(self, tmp_path: Path) -> None:
        text = "csd0 ansible_password=x ansible_python_interpreter='/usr/bin/env python3'\n"
        found, warnings = read(tmp_path, text)
        assert found["csd0"].python == ""
        assert list(warnings.values()) == [["csd0"], ["csd0"]]
        assert "password" in "".join(warnings)

    def test_limit_accepts_groups_and_ranges(self, tmp_path: Path) -> None:
        path = tmp_path / "hosts"
        path.write_text("[a]\ncsd[0:3]\n[b]\ncsd[2:5]\n")
        found, _ = list_targets(load_inventory(path), str(path), ["b", "csd[0-1]"], ["csd3"])
        assert [target.name for target in found] == ["csd0", "csd1", "csd2", "csd4", "csd5"]


class TestWhatOnlyAnsibleCanTell:
    @pytest.mark.parametrize("value", ["{{ base }}.1", "'{% if x %}a{% endif %}'"])
    def test_template_is_refused_with_its_line(self, tmp_path: Path, value: str) -> None:
        error = refused(tmp_path, f"[a]\ncsd0 ansible_host='{value.strip(chr(39))}'\n")
        assert f"{tmp_path}/hosts.ini:2: ansible_host of csd0 is a template" in error.message
        assert f"ansible-inventory -i {tmp_path}/hosts.ini --list" in error.remedy

    def test_template_in_an_unused_variable_is_accepted(self, tmp_path: Path) -> None:
        assert read(tmp_path, "csd0 role='{{ x }}'\n")[0]

    def test_vaulted_value_is_refused_with_its_line(self, tmp_path: Path) -> None:
        text = (
            "all:\n  hosts:\n    csd0:\n      ansible_user: !vault |\n"
            "        $ANSIBLE_VAULT;1.1;AES256\n        6\n"
        )
        error = refused(tmp_path, text, "hosts.yml")
        assert "hosts.yml:4: ansible_user of csd0 is encrypted" in error.message

    def test_vaulted_variables_file_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "group_vars").mkdir()
        (tmp_path / "group_vars" / "all.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n66\n")
        _, warnings = read(tmp_path, "csd0\n")
        assert [message for message in warnings if "all.yml is encrypted" in message]

    def test_program_is_never_run(self, tmp_path: Path) -> None:
        error = refused(tmp_path, f"#!/bin/sh\ntouch {tmp_path}/ran\n", "hosts.sh")
        assert "is an inventory program" in error.message
        assert not (tmp_path / "ran").exists()

    def test_plugin_configuration_and_directories_are_refused(self, tmp_path: Path) -> None:
        assert "plugin" in refused(tmp_path, "plugin: aws_ec2\n", "aws.yml").message
        with pytest.raises(InputError, match="is a directory"):
            load_inventory(tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("[a]\ncsd0 'x\n", "hosts.ini", "hosts.ini:2: not a host line"),
        ("[a]\ncsd0 port\n", "hosts.ini", "hosts.ini:2: expected key=value, found 'port'"),
        ("[a:hosts:b]\n", "hosts.ini", "hosts.ini:1: "),
        ("[a:odd]\n", "hosts.ini", "hosts.ini:1: section [a:odd]"),
        ("[a:children]\nnobody\n", "hosts.ini", "hosts.ini:2: group 'nobody' is not defined"),
        ("[a:vars]\nx=1\n", "hosts.ini", "hosts.ini:1: group 'a' is not defined"),
        ("[a:children]\nb\n[b:children]\na\n", "hosts.ini", "hosts.ini:4: group 'a' contains group 'b'"),
        ("csd[05:2]\n", "hosts.ini", "hosts.ini:1: range [05:2] in 'csd[05:2]' is invalid"),
        ("csd[a:9]\n", "hosts.ini", "hosts.ini:1: range"),
        ("csd[0:99999999999]\n", "hosts.ini", "hosts.ini:1: range"),
        ("csd[0:9999][0:9999]\n", "hosts.ini", "hosts.ini:1: 'csd[0:9999][0:9999]' expands to more than"),
        ("all:\n  <<: word\n", "hosts.yml", "hosts.yml:2: expected keys and values"),
        ("all:\n  hosts: [csd0]\n", "hosts.yml", "hosts.yml:2: expected keys and values"),
        ("all:\n  host: {csd0: }\n", "hosts.yml", "hosts.yml:2: group 'all' has 'host'"),
        ("all: {\n", "hosts.yml", "hosts.yml:2: not valid YAML"),
        ("- a\n", "hosts.yml", "expected"),
        ('{"_meta": {}}', "list.json", "is not output of"),
        ("", "hosts.ini", "has no host"),
        ("fd00::1\n", "hosts.ini", "'fd00::1' is not a valid node name"),
        ("csd0 ansible_ssh_common_args='-Z'\n", "hosts.ini", "hosts.ini:1: ansible_ssh_common_args '-Z'"),
    ],
)
@pytest.mark.fault(38)
def test_invalid_inventory_is_reported_with_its_line(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    assert message in refused(tmp_path, text, name).message
