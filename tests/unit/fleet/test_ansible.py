"""Hosts in the output of `ansible-inventory --list`, as ssh would reach them."""

import json
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import InputError
from csdctl.fleet.ansible import list_targets, parse_inventory
from csdctl.fleet.openssh import Target

INVENTORIES = Path(__file__).parent / "inventories"


def read(**hosts: dict[str, Any]) -> tuple[dict[str, Target], dict[str, list[str]]]:
    content = {"_meta": {"hostvars": hosts}, "all": {"children": ["ungrouped"]}}
    targets, warnings = list_targets(parse_inventory(json.dumps(content), "hosts"), {})
    return {target.name: target for target in targets}, warnings


@pytest.mark.parametrize("name", ["ranges.ini", "tree.yml", "with_vars/hosts", "bare"])
def test_captured_output_names_hosts_groups_and_variables(name: str) -> None:
    text = (INVENTORIES / f"{name}.list.json").read_text()
    printed = json.loads(text)
    inventory = parse_inventory(text, name)
    assert inventory.variables == printed.pop("_meta")["hostvars"]
    for group in printed.keys() - {"all", "ungrouped"}:
        members = {host for host, names in inventory.groups.items() if group in names}
        assert members >= {*printed[group].get("hosts", ())}


def test_arguments_come_in_ansibles_order() -> None:
    variables = {
        "ansible_ssh_extra_args": "-4",
        "ansible_ssh_common_args": "-6",
        "ansible_ssh_args": "-p 1",
        "ansible_port": 2,
    }
    assert read(csd0=variables)[0]["csd0"].words == ("-p", "1", "-p", "2", "-6", "-4", "--", "csd0")


def test_hosts_without_ssh_and_unusable_settings_are_reported() -> None:
    targets, warnings = read(
        csd0={"ansible_password": "x", "ansible_python_interpreter": "/usr/bin/env python3"},
        localhost={},
        server={"ansible_connection": "local"},
        switch={"ansible_connection": "network_cli"},
    )
    assert (list(targets), targets["csd0"].python) == (["csd0"], "")
    assert warnings == {
        "uses a password in Ansible; csdctl uses keys": ["csd0"],
        "ansible_python_interpreter '/usr/bin/env python3' is ignored: not a single program": ["csd0"],
        "is the host itself: skipped": ["localhost", "server"],
        "uses `network_cli`, not SSH: skipped": ["switch"],
    }


def test_limit_accepts_groups_and_ranges() -> None:
    groups = {"a": {"hosts": [f"csd{n}" for n in range(4)]}, "b": {"hosts": [f"csd{n}" for n in range(2, 6)]}}
    inventory = parse_inventory(json.dumps({"_meta": {"hostvars": {}}, **groups}), "hosts")
    targets, _ = list_targets(inventory, {}, ["b", "csd[0-1]"], ["csd3"])
    assert [target.name for target in targets] == ["csd0", "csd1", "csd2", "csd4", "csd5"]


def described(**variables: Any) -> str:
    return json.dumps({"_meta": {"hostvars": {"csd0": variables}}})


@pytest.mark.fault(38)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[csds]\ncsd[0:3]\n", "cannot be read"),
        ('{"all": {}}', "is not output of `ansible-inventory --list`"),
        ('{"_meta": {}}', "key `hostvars` is missing"),
        ('{"_meta": {"hostvars": {}}, "a": {"hosts": {"csd0": {}}}}', "`a.hosts`"),
        ('{"_meta": {"hostvars": {}}}', "has no host"),
        (described(ansible_host="{{ base }}.1"), "csd0: ansible_host is a template"),
        (described(ansible_user={"__ansible_vault": "$ANSIBLE_VAULT;1.1"}), "csd0: ansible_user is a"),
        (described(ansible_ssh_common_args="'"), "csd0: its arguments of ssh cannot be read: No closing"),
        (described(ansible_connection="docker"), "access: csd0 uses `docker`, not SSH: skipped"),
        ('{"_meta": {"hostvars": {"fd00::1": {}}}}', "fd00::1 is not a valid node name"),
    ],
)
def test_invalid_inventory_is_reported(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        list_targets(parse_inventory(text, "hosts"), {})
    assert message in raised.value.message
