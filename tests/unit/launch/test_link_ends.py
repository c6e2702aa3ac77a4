"""Which interfaces the ends of a link use."""

from typing import Any

import pytest

from csdctl.errors import NodeError
from csdctl.launch import mpirun
from csdctl.launch.mpirun import find_paths

LO = ("lo", "127.0.0.1")
DOCKER = ("docker0", "172.17.0.1")
HOST = [
    LO,
    ("m", "10.1.0.1"),
    ("l0", "10.92.0.1"),
    ("l1", "10.92.1.5"),
    DOCKER,
    ("m", "fd01::1"),
    ("l0", "fd92::1"),
]
NODE = [LO, ("eth0", "10.1.0.2"), ("csd", "10.92.0.2"), DOCKER, ("eth0", "fd01::2"), ("csd", "fd92::2")]
ROUTES = {"10.1.0.2": "10.1.0.1", "10.92.0.2": "10.92.0.1", "fd01::2": "fd01::1", "fd92::2": "fd92::1"}


@pytest.fixture(autouse=True)
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {**ROUTES, "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(mpirun, "_route", lambda address: routes.get(address, ""))


def paths(network: str = "", reached_at: str = "10.1.0.2", node: object = NODE) -> list[tuple[str, ...]]:
    interfaces: Any = {"host": HOST, "csd0": node}
    ends = find_paths("csd0", "host", network, reached_at, interfaces)
    return [(near.interface, far.interface, far.address) for near, far in ends]


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("10.92.0.0/16", [("l0", "csd", "10.92.0.2")]),
        ("fd92::/64", [("l0", "csd", "fd92::2")]),
        ("10.1.0.0/24", [("m", "eth0", "10.1.0.2")]),
    ],
)
def test_network_of_the_fleet_file_decides(network: str, expected: list[tuple[str, ...]]) -> None:
    """Also where it has several interfaces of the host."""
    assert paths(network) == expected


def test_without_a_network_the_address_of_ssh_comes_first_and_then_others_with_a_route() -> None:
    """A bridge within both machines has no other address than theirs, and is not tried."""
    first, *further = paths()
    assert first == ("m", "eth0", "10.1.0.2")
    assert {*further} == {("l0", "csd", "10.92.0.2"), ("m", "eth0", "fd01::2"), ("l0", "csd", "fd92::2")}
    assert paths(reached_at="192.0.2.7")[0][2] in ROUTES, "a forwarded port says nothing of the address"
    assert paths(reached_at="127.0.0.1", node=HOST)[0] == ("lo", "lo", "127.0.0.1")


def test_ends_have_the_addresses_of_one_interface_and_family() -> None:
    several = [*NODE, ("csd", "10.92.0.200")]
    [(near, far)] = find_paths("csd0", "host", "10.92.0.0/16", "10.92.0.2", {"host": HOST, "csd0": several})
    assert far.addresses == ("10.92.0.2", "10.92.0.200")
    assert near.addresses == ("10.92.0.1",)
    assert not near.is_loopback


def test_link_from_a_server_uses_its_address_that_is_nearest_to_the_node() -> None:
    [(near, far)] = find_paths("csd0", "s1", "10.92.0.0/16", "10.1.0.2", {"s1": HOST, "csd0": NODE})
    assert (near.interface, far.interface) == ("l0", "csd")


@pytest.mark.parametrize(
    ("network", "node", "message"),
    [
        ("10.5.0.0/16", NODE, r"no address in 10\.5\.0\.0/16: 127\.0\.0\.1, 10\.1\.0\.2"),
        ("10.7.0.0/16", [LO, ("x", "10.7.0.9")], r"host has no route to 10\.7\.0\.9"),
        ("", [LO], "no address in a network of host: 127"),
    ],
)
def test_node_that_cannot_be_reached_is_named_with_its_addresses(
    network: str, node: object, message: str
) -> None:
    with pytest.raises(NodeError, match=message) as caught:
        paths(network, "192.0.2.7", node)
    assert caught.value.node == "csd0"
