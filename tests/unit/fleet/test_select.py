from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet, Node, select_nodes

NAMES = [f"csd{number}" for number in range(12)] + [f"dpu{number:02d}" for number in range(12)] + ["jetson"]
FLEET = Fleet(
    tuple(
        Node(name, "10.1.1.1", groups=("front", "all") if name in ("csd0", "csd11", "jetson") else ("back",))
        for name in NAMES
    ),
    path=Path("fleet.yaml"),
)


def chosen(*limit: str, exclude: tuple[str, ...] = ()) -> list[str]:
    return [node.name for node in select_nodes(FLEET, limit, exclude).nodes]


def test_without_patterns_all_nodes_are_selected() -> None:
    assert chosen() == NAMES


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("csd3", ["csd3"]),
        ("csd1*", ["csd1", "csd10", "csd11"]),
        ("csd?", [f"csd{k}" for k in range(10)]),
        ("csd[0-7]", [f"csd{k}" for k in range(8)]),
        ("csd[9-11]", ["csd9", "csd10", "csd11"]),
        ("dpu[00-11]", [f"dpu{k:02d}" for k in range(12)]),
        ("dpu[08-10]", ["dpu08", "dpu09", "dpu10"]),
        ("dpu[0-1][0-1]", ["dpu00", "dpu01", "dpu10", "dpu11"]),
        ("[c-d]*0", ["csd0", "csd10", "dpu00", "dpu10"]),
        ("csd[5-99]", [f"csd{k}" for k in range(5, 12)]),
        ("front", ["csd0", "csd11", "jetson"]),
        ("csd0,jetson", ["csd0", "jetson"]),
        (" csd0 , csd[2-3] ,", ["csd0", "csd2", "csd3"]),
    ],
)
def test_pattern_selects_names_in_fleet_order(pattern: str, names: list[str]) -> None:
    assert chosen(pattern) == names


def test_several_patterns_are_combined() -> None:
    assert chosen("jetson", "csd1,csd0", "csd1") == ["csd0", "csd1", "jetson"]


def test_excluded_nodes_are_removed_from_the_selection() -> None:
    assert chosen("csd*", exclude=("csd[2-99]", "front")) == ["csd1"]


def test_excluding_an_unselected_node_is_not_an_error() -> None:
    assert chosen("csd1", exclude=("jetson",)) == ["csd1"]


def test_leading_zeros_distinguish_names() -> None:
    with pytest.raises(InputError, match="matches no node"):
        chosen("dpu[0-9]")


@pytest.mark.fault(39)
@pytest.mark.parametrize("option", ["--limit", "--exclude"])
@pytest.mark.parametrize("pattern", ["csd12", "CSD0", "nowhere*", "csd[20-30]"])
def test_pattern_without_a_match_is_refused_with_the_nodes(option: str, pattern: str) -> None:
    arguments = {"limit" if option == "--limit" else "exclude": [f"csd0,{pattern}"]}
    with pytest.raises(InputError) as raised:
        select_nodes(FLEET, **arguments)
    assert raised.value.message == f"{option} {pattern!r} matches no node of fleet.yaml"
    assert raised.value.remedy == f"nodes: {', '.join(NAMES[:8])}, …"


def test_reversed_range_is_refused() -> None:
    with pytest.raises(InputError, match="is invalid"):
        chosen("csd[7-0]")


@pytest.mark.parametrize("pattern", ["csd[0-999999999999]", "csd[0-9][0-9999][0-9999]"])
def test_range_of_too_many_names_is_refused_at_once(pattern: str) -> None:
    with pytest.raises(InputError, match="expands to more than 100,000 names"):
        chosen(pattern)


def test_other_fields_of_the_fleet_are_unchanged() -> None:
    selected = select_nodes(Fleet(FLEET.nodes, network="10.1.1.0/24", emulated=True), ["csd0"])
    assert (selected.network, selected.emulated, len(selected.nodes)) == ("10.1.1.0/24", True, 1)


def test_host_alone_is_left_where_that_is_enough() -> None:
    assert select_nodes(FLEET, exclude=["*"], may_be_empty=True).nodes == ()
