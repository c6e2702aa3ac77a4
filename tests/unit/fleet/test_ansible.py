"""Hosts in the output of `ansible-inventory --list`, as ssh would reach them."""

import json
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import InputError
from csdctl.fleet.ansible import list_targets, load_inventory
from csdctl.fleet.openssh import Target

INVENTORIES = Path(__file__).parent / "inventories"
NAMES = ["ranges.ini", "tree.yml", "with_vars/hosts", "bare"]


def read(
    directory: Path, groups: dict[str, Any] | None = None, **hosts: dict[str, Any]
) -> tuple[dict[str, Target], dict[str, list[str]]]:
    content = {"_meta": {"hostvars": hosts}, "all": {"children": ["ungrouped"]}, **(groups or {})}
    path = directory / "inventory.json"
    path.write_text(json.dumps(content))
    found, warnings = list_targets(load_inventory(path), {})
    return {target.name: target for target in found}, warnings


def refused(directory: Path, text: str) -> InputError:
    path = directory / "hosts"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        list_targets(load_inventory(path), {})
    return raised.value


@pytest.mark.parametrize("name", NAMES)
def test_captured_output_names_hosts_groups_and_variables(name: str) -> None:
    path = INVENTORIES / f"{name}.list.json"
    printed = json.loads(path.read_text())
    variables = printed.pop("_meta")["hostvars"]
    inventory = load_inventory(path)
    assert set(inventory.groups) >= set(variables)
    for group, entry in printed.items():
        if group not in ("all", "ungrouped"):
            assert {host for host, own in inventory.groups.items() if group in own} >= set(
                entry.get("hosts", ())
            )
    assert inventory.variables == variables


def test_arguments_come_in_ansibles_order(tmp_path: Path) -> None:
    variables = {
        "ansible_ssh_extra_args": "-4",
        "ansible_ssh_common_args": "-6",
        "ansible_ssh_args": "-p 1",
        "ansible_port": 2,
    }
    assert read(tmp_path, csd0=variables)[0]["csd0"].arguments == ("-p", "1", "-p", "2", "-6", "-4")


def test_hosts_without_ssh_and_unusable_settings_are_reported(tmp_path: Path) -> None:
    found, warnings = read(
        tmp_path,
        csd0={"ansible_password": "x", "ansible_python_interpreter": "/usr/bin/env python3"},
        localhost={},
        server={"ansible_connection": "local"},
        switch={"ansible_connection": "network_cli"},
    )
    assert (list(found), found["csd0"].python) == (["csd0"], "")
    assert warnings == {
        "uses a password in Ansible; csdctl uses keys": ["csd0"],
        "ansible_python_interpreter '/usr/bin/env python3' is ignored: not a single program": ["csd0"],
        "is the host itself: skipped": ["localhost", "server"],
        "uses `network_cli`, not SSH: skipped": ["switch"],
    }


def test_limit_accepts_groups_and_ranges(tmp_path: Path) -> None:
    groups = {"a": {"hosts": [f"csd{n}" for n in range(4)]}, "b": {"hosts": [f"csd{n}" for n in range(2, 6)]}}
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"_meta": {"hostvars": {}}, **groups}))
    found, _ = list_targets(load_inventory(path), {}, ["b", "csd[0-1]"], ["csd3"])
    assert [target.name for target in found] == ["csd0", "csd1", "csd2", "csd4", "csd5"]


def described(**variables: Any) -> str:
    return json.dumps({"_meta": {"hostvars": {"csd0": variables}}})


@pytest.mark.fault(38)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[csds]\ncsd[0:3]\n", "cannot be read"),
        ("all: {hosts: {csd0: }}\n", "cannot be read"),
        ('{"all": {}}', "is not output of `ansible-inventory --list`"),
        ('{"_meta": {}}', "key `hostvars` is missing"),
        ('{"_meta": {"hostvars": {}}, "a": {"hosts": {"csd0": {}}}}', "`a.hosts`"),
        ('{"_meta": {"hostvars": {}}}', "has no host"),
        (described(ansible_host="{{ base }}.1"), "csd0: ansible_host is a template"),
        (described(ansible_user={"__ansible_vault": "$ANSIBLE_VAULT;1.1"}), "csd0: ansible_user is a"),
        (described(ansible_ssh_common_args="-Z"), "csd0: its arguments of ssh cannot be read: option -Z"),
        (described(ansible_connection="docker"), "access: csd0 uses `docker`, not SSH: skipped"),
        ('{"_meta": {"hostvars": {"fd00::1": {}}}}', "fd00::1 is not a valid node name"),
    ],
)
def test_invalid_inventory_is_reported(tmp_path: Path, text: str, message: str) -> None:
    error = refused(tmp_path, text)
    assert message in error.message
    if "cannot be read:" in error.message and text[0] != "{":
        assert f"ansible-inventory -i {tmp_path}/hosts --list" in error.remedy
