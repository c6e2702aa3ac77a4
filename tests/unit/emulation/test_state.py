from pathlib import Path

import pytest

from csdctl.emulation.fleet import (
    EmulatedSpec,
    FleetPaths,
    FleetState,
    NodeState,
    fleet_status,
    load_state,
    remove_fleet,
    save_fleet_file,
    save_state,
    start_fleet,
    stop_fleet,
)
from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet


@pytest.fixture
def paths(tmp_path: Path) -> FleetPaths:
    return FleetPaths(tmp_path / ".csdctl" / "emulated")


@pytest.fixture
def state(paths: FleetPaths, tmp_path: Path) -> FleetState:
    nodes = (NodeState("csd0", 123, 456, 2200, "duty"), NodeState("csd1", 124, 457, 2201, "duty"))
    return FleetState(paths.fleet_id, EmulatedSpec((0.5, 0.25)), "auto", tmp_path / "fleet.yaml", nodes)


def test_state_round_trips(paths: FleetPaths, state: FleetState) -> None:
    save_state(paths, state)
    assert load_state(paths) == state


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": 1, "nodes": 3}'])
def test_fleet_whose_state_is_damaged_keeps_the_files_of_its_nodes_until_it_is_removed(
    paths: FleetPaths, content: str
) -> None:
    data = paths.node("csd0") / "home" / "private" / "labels.npy"
    data.parent.mkdir(parents=True)
    data.touch()
    paths.marker.touch()
    paths.state.write_text(content)
    for use in (
        lambda: start_fleet(paths.directory, EmulatedSpec((0.5,))),
        lambda: stop_fleet(paths.directory, keep=True),
        lambda: fleet_status(paths.directory),
    ):
        with pytest.raises(InputError, match=f"{paths.state}") as raised:
            use()
        assert raised.value.remedy == "remove the fleet with all files of its nodes: `csdctl emulate down`"
    assert data.exists()
    stop_fleet(paths.directory)
    assert not paths.directory.exists()
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


def test_only_an_unedited_fleet_file_of_this_fleet_is_overwritten_and_removed_with_its_facts(
    paths: FleetPaths, state: FleetState
) -> None:
    path = state.fleet_path
    save_fleet_file(paths, state, "python3")
    text = path.read_text()
    for other in (text.replace(paths.fleet_id, "another"), text + "# mine\n"):
        path.write_text(other)
        remove_fleet(paths)
        with pytest.raises(InputError, match="was edited, or not written by"):
            start_fleet(paths.directory, state.spec, fleet_path=path)
        assert path.read_text() == other
    path.write_text(text)
    path.with_name("fleet.facts.json").write_text("{}")
    remove_fleet(paths)
    assert not [*path.parent.glob("fleet.*")]
