from pathlib import Path

import paramiko
import pytest

from csdctl.emulation.files import (
    add_host_keys,
    check_may_write,
    is_unchanged,
    remove_fleet_file,
    remove_host_keys,
    save_fleet_file,
)
from csdctl.emulation.state import EmulatedSpec, FleetPaths, FleetState, NodeState, load_state, save_state
from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIP4gQz16wCSBnkkB1kHtEl1Saiy1vZ4Jpp1hBDxD2KmO"
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDNrV2QZ/iz/ccK1hpSVAUYhSHWoaOp3qQXOp008UhgQ"
FOREIGN = "csd7.example ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJYUtJpZeL8stBawUxg3yWk4XNWjw+hURbbC3qlJHgwX\n"


@pytest.fixture
def paths(tmp_path: Path) -> FleetPaths:
    return FleetPaths(tmp_path / ".csdctl" / "emulated")


@pytest.fixture
def state(paths: FleetPaths, tmp_path: Path) -> FleetState:
    nodes = (NodeState("csd0", 123, 456, 2200, "duty"), NodeState("csd1", 124, 457, 2201, "duty"))
    return FleetState(paths.fleet_id, EmulatedSpec(2), "auto", tmp_path / "fleet.yaml", nodes)


def test_state_round_trips(paths: FleetPaths, state: FleetState) -> None:
    save_state(paths, state)
    assert load_state(paths) == state


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": 1, "nodes": 3}'])
def test_unusable_state_counts_as_lost(paths: FleetPaths, content: str) -> None:
    paths.directory.mkdir(parents=True)
    paths.state.write_text(content)
    assert load_state(paths) is None


def test_the_fleet_id_is_derived_from_the_directory(tmp_path: Path) -> None:
    assert FleetPaths(tmp_path / "a" / ".." / "b").fleet_id == FleetPaths(tmp_path / "b").fleet_id
    assert FleetPaths(tmp_path / "a").fleet_id != FleetPaths(tmp_path / "b").fleet_id


def test_the_fleet_file_can_be_read_by_csdctl(paths: FleetPaths, state: FleetState) -> None:
    save_fleet_file(paths, state, "/opt/python")
    fleet = load_fleet(state.fleet_path)
    assert fleet.emulated
    assert fleet.network == "127.0.0.0/8"
    assert [(node.name, node.address, node.port) for node in fleet.nodes] == [
        ("csd0", "127.0.0.1", 2200),
        ("csd1", "127.0.0.1", 2201),
    ]
    assert {(node.user, node.key, node.python, node.groups) for node in fleet.nodes} == {
        ("csd", paths.key, "/opt/python", ("emulated",))
    }


def test_only_an_unchanged_fleet_file_is_removed_with_its_facts(paths: FleetPaths, state: FleetState) -> None:
    path = state.fleet_path
    save_fleet_file(paths, state, "python3")
    assert not is_unchanged(path, "another")
    path.write_text(path.read_text() + "# mine\n")
    assert not remove_fleet_file(path, paths.fleet_id)
    with pytest.raises(InputError, match="left unchanged"):
        check_may_write(path, paths.fleet_id)
    save_fleet_file(paths, state, "python3")
    path.with_name("fleet.facts.json").write_text("{}")
    assert remove_fleet_file(path, paths.fleet_id)
    assert not [*path.parent.glob("fleet.*")]


def test_host_keys_are_readable_and_replace_those_of_the_same_port(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(FOREIGN)
    add_host_keys(path, {2200: OTHER_KEY, 2201: OTHER_KEY}, "older")
    add_host_keys(path, {2200: f"{KEY} a comment"}, "newer")
    known = paramiko.HostKeys(str(path))
    assert known.lookup("[127.0.0.1]:2200")["ssh-ed25519"].get_base64() == KEY.split()[1]  # type: ignore[index]
    assert path.read_text().count("[127.0.0.1]:2200 ") == 1
    assert "csd7.example" in known


def test_down_removes_only_its_own_host_keys(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    add_host_keys(path, {2200: KEY}, "mine")
    remove_host_keys(path, "mine")
    assert not path.exists()
    path.write_text(FOREIGN)
    add_host_keys(path, {2200: KEY}, "mine")
    remove_host_keys(path, "mine")
    assert path.read_text() == FOREIGN
