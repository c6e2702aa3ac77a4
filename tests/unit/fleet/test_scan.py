from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts, load_facts, save_facts
from csdctl.fleet.model import Fleet
from csdctl.fleet.reading import load_fleet
from csdctl.fleet.scan import MAX_ADDRESSES, expand_addresses, name_nodes
from csdctl.fleet.writing import render_fleet


@pytest.mark.parametrize(
    ("cidr", "addresses"),
    [
        ("10.1.2.0/30", ["10.1.2.1", "10.1.2.2"]),
        ("10.1.2.9/30", ["10.1.2.9", "10.1.2.10"]),
        ("10.1.2.4/31", ["10.1.2.4", "10.1.2.5"]),
        ("10.1.2.4/32", ["10.1.2.4"]),
        ("10.1.2.4", ["10.1.2.4"]),
        ("fd00::/126", ["fd00::1", "fd00::2", "fd00::3"]),
    ],
)
def test_network_expands_to_its_host_addresses(cidr: str, addresses: list[str]) -> None:
    assert expand_addresses(cidr) == addresses


def test_largest_range_is_accepted_and_a_larger_one_refused() -> None:
    assert len(expand_addresses("10.0.0.0/20")) == MAX_ADDRESSES - 2
    for cidr in ("10.0.0.0/19", "10.0.0.0/8", "fd00::/64"):
        with pytest.raises(InputError, match="at most 4096"):
            expand_addresses(cidr)


@pytest.mark.parametrize("cidr", ["", "here", "10.0.0.0/33", "10.0.0/24", "-oProxyCommand=x"])
def test_invalid_range_is_refused(cidr: str) -> None:
    with pytest.raises(InputError, match="not an address range"):
        expand_addresses(cidr)


def test_written_fleet_round_trips(tmp_path: Path) -> None:
    nodes = name_nodes(["10.1.2.4", "fd00::1"], user="trainer", key=tmp_path / "my key: #1", port=2222)
    path = tmp_path / "fleet.yaml"
    path.write_text(render_fleet(Fleet(nodes, network="10.1.2.0/24"), origin="Found"))
    fleet = load_fleet(path)
    assert fleet.nodes == nodes
    assert [node.name for node in nodes] == ["csd0", "csd1"]
    assert fleet.network == "10.1.2.0/24"


def test_empty_fleet_is_not_written() -> None:
    with pytest.raises(InputError):
        render_fleet(Fleet(()), origin="Found")


def test_facts_round_trip_with_their_notes(tmp_path: Path) -> None:
    fleet = Fleet((), path=tmp_path / "fleet.yaml")
    facts = {"csd0": Facts("csd0", cpu_features=("fp",), notes=("look",), problem="gone")}
    save_facts(fleet, facts)
    assert load_facts(fleet) == facts
