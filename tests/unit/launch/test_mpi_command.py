"""The command line of mpirun, and the interfaces that the ends of a link use."""

import os
import subprocess
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import NodeError
from csdctl.fleet.model import HOST_NAME
from csdctl.launch import mpirun
from csdctl.launch.mpi_job import ENDED
from csdctl.launch.mpirun import End, RankCommand, build_mpirun_command, find_paths

GOLDEN = Path(__file__).parent / "golden" / "mpirun_command"
PYTHON = "/opt/my python/bin/python"
LINK = ("-u", "w.pyz", "link", "--rank", "3", "--marker", "csdctl-run=r/it's; $HOME `x`")
ENDS = (
    RankCommand(0, HOST_NAME, ("/venv/bin/python", *LINK), "eth0"),
    RankCommand(3, "csd2", (PYTHON, *LINK), "csd"),
)


def build(address: str = "10.1.1.1", ends: tuple[RankCommand, ...] = ENDS) -> list[str]:
    near = End("eth0", (address,), address)
    return build_mpirun_command(Path("/venv/bin/mpirun"), "/opt/venv", near, ends, run_id="20260101")


def contexts(command: list[str]) -> list[list[str]]:
    """Return the arguments of every application context, starting with --host."""
    start = command.index("--host")
    return [[*words] for is_colon, words in groupby(command[start:], ":".__eq__) if not is_colon]


def test_mpirun_command_matches_the_golden_file() -> None:
    built = "".join(f"{word}\n" for word in build())
    if "CSDCTL_ACCEPT_GOLDEN" in os.environ:
        GOLDEN.write_text(built)
    assert built == GOLDEN.read_text(), (
        f"the mpirun command differs from {GOLDEN} (an argument per line); if intended, run this test "
        "again with CSDCTL_ACCEPT_GOLDEN=1 and commit the file"
    )


def run_context(words: list[str], home: Path) -> "subprocess.CompletedProcess[str]":
    """Run the arguments of a context as mpirun does, without a shell."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    return subprocess.run(words[4:], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("argument", ["a b", "it's", "$HOME", "`id`", 'say "x"', "a;b", "a\\b", "*", "ü"])
def test_special_characters_in_arguments_survive(tmp_path: Path, argument: str) -> None:
    program = ("printf", "%s|", argument, "end")
    ends = (RankCommand(0, HOST_NAME, program, "x"), RankCommand(1, "csd0", program, "x"))
    for words in contexts(build(ends=ends)):
        assert run_context(words, tmp_path).stdout == f"{argument}|end|"


def test_end_that_fails_is_reported_with_its_machine(tmp_path: Path) -> None:
    ends = (ENDS[0], RankCommand(1, "csd-1.a_b", ("sh", "-c", "kill -9 $$"), "x"))
    done = run_context(contexts(build(ends=ends))[1], tmp_path)
    assert (done.returncode, done.stdout) == (137, f"{ENDED}csd-1.a_b 137\n")


@pytest.mark.parametrize(
    ("address", "of_daemons", "disabled"),
    [("10.1.1.1", "eth0", "6"), ("fd91::1", "eth0", "4"), ("127.0.0.1", None, "6"), ("::1", None, "4")],
)
def test_daemons_use_the_interface_unless_it_is_the_loopback(
    address: str, of_daemons: str | None, disabled: str
) -> None:
    """PRRTE never uses the loopback."""
    values = dict(pairwise(build(address)))
    assert (values.get("prte_if_include"), values["btl_tcp_disable_family"]) == (of_daemons, disabled)


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
