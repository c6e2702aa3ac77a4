import os
import socket
import subprocess
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME
from csdctl.launch.mpirun import (
    RankCommand,
    build_mpirun_command,
    check_addresses,
    check_network,
    choose_prefix,
    daemon_marker,
    find_mpirun,
)
from csdctl.worker.protocol.events import Exited, event_from_line

GOLDEN = Path(__file__).parent / "golden" / "mpirun_command"
RANKS = (
    RankCommand(0, HOST_NAME, ("/venv/bin/python", "-u", "w.pyz", "rank", "--spec", "s.json")),
    RankCommand(
        1, "csd0", ("python3", "-u", "w.pyz", "rank", "--spec", "s.json", "--marker", "csdctl-run=r/csd0")
    ),
    RankCommand(2, "csd1", ("/opt/my python/bin/python", "-u", "w.pyz", "rank", "--spec", "it's; $HOME `x`")),
)


def build(network: str = "10.1.1.0/24", ranks: tuple[RankCommand, ...] = RANKS) -> list[str]:
    return build_mpirun_command(Path("/venv/bin/mpirun"), "/opt/venv", "agent", network, ranks)


def contexts(command: list[str]) -> list[list[str]]:
    """Return the arguments of every application context, starting with --host."""
    rest = command[command.index("--host") :]
    found: list[list[str]] = [[]]
    for word in rest:
        if word == ":":
            found.append([])
        else:
            found[-1].append(word)
    return found


def after(command: list[str], word: str) -> str | None:
    return command[command.index(word) + 1] if word in command else None


def test_mpirun_command_matches_the_golden_file() -> None:
    built = "".join(f"{word}\n" for word in build())
    if "CSDCTL_ACCEPT_GOLDEN" in os.environ:
        GOLDEN.write_text(built)
    assert built == GOLDEN.read_text(), (
        f"the mpirun command differs from {GOLDEN} (an argument per line); if intended, run this test "
        "again with CSDCTL_ACCEPT_GOLDEN=1 and commit the file"
    )


def test_network_is_passed_to_ranks_and_daemons() -> None:
    command = build("10.1.1.0/24")
    assert after(command, "btl_tcp_if_include") == "10.1.1.0/24"
    assert after(command, "prte_if_include") == "10.1.1.0/24"


def test_mpi_chooses_interfaces_without_a_network() -> None:
    command = build("")
    assert "btl_tcp_if_include" not in command
    assert "prte_if_include" not in command
    assert "" not in command


def test_loopback_is_not_passed_to_the_daemons() -> None:
    command = build("127.0.0.0/8")
    assert after(command, "btl_tcp_if_include") == "127.0.0.0/8"
    assert "prte_if_include" not in command


def run_context(words: list[str], home: Path) -> "subprocess.CompletedProcess[str]":
    """Run the arguments of a context as mpirun does, without a shell."""
    return subprocess.run(
        words[4:],
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("argument", ["a b", "it's", "$HOME", "`id`", 'say "x"', "a;b", "a\\b", "*", "ü"])
def test_special_characters_in_arguments_survive(tmp_path: Path, argument: str) -> None:
    for node in (HOST_NAME, "csd0"):
        (words,) = contexts(build(ranks=(RankCommand(3, node, ("printf", "%s|", argument, "end")),)))
        done = run_context(words, tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{argument}|end|")


def test_rank_on_a_node_starts_in_its_home_and_one_on_the_host_in_the_project(tmp_path: Path) -> None:
    here = run_context(contexts(build(ranks=(RankCommand(0, HOST_NAME, ("pwd",)),)))[0], tmp_path)
    there = run_context(contexts(build(ranks=(RankCommand(1, "csd0", ("pwd",)),)))[0], tmp_path)
    assert here.stdout.strip() == os.getcwd()
    assert there.stdout.strip() == str(tmp_path)


@pytest.mark.parametrize(("ending", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_rank_that_fails_is_reported_with_its_node(tmp_path: Path, ending: str, code: int) -> None:
    ranks = (RANKS[0], RankCommand(1, "csd-1.a_b", ("sh", "-c", ending)))
    done = run_context(contexts(build(ranks=ranks))[1], tmp_path)
    assert done.returncode == code
    assert event_from_line(done.stdout.strip()) == Exited(1, "csd-1.a_b", code)


def test_node_with_the_name_of_this_machine_is_not_taken_for_it() -> None:
    name = socket.gethostname()
    (words,) = contexts(build(ranks=(RankCommand(7, name, ("true",)),)))
    assert words[1] == f"rank7-{name}:1"


def test_daemons_have_the_run_id_in_their_command_lines() -> None:
    command = build_mpirun_command(
        Path("/venv/bin/mpirun"), "/opt/venv", "agent", "", RANKS, run_id="20261121-1-2"
    )
    assert after(command, daemon_marker("20261121-1-2")) == "1"
    assert not any("csdctl_run" in word for word in build())


def test_this_environment_has_mpirun() -> None:
    assert find_mpirun().name == "mpirun"


def test_nodes_share_one_prefix_or_the_error_lists_them() -> None:
    facts = {"csd0": Facts("csd0", prefix="/opt/a"), "csd1": Facts("csd1", prefix="/opt/b")}
    assert choose_prefix(["csd0"], facts) == "/opt/a"
    with pytest.raises(InputError, match="/opt/a, /opt/b"):
        choose_prefix(["csd0", "csd1"], facts)


# From /proc/net/fib_trie of a machine with two addresses on one interface.
FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 4
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.1.1.0/24 2 0 2
        |-- 10.1.1.0
           /24 link UNICAST
Local:
  +-- 0.0.0.0/0 2 0 2
     +-- 10.1.1.0/24 2 0 2
        |-- 10.1.1.1
           /32 host LOCAL
        |-- 10.1.1.255
           /32 link BROADCAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.0
           /8 host LOCAL
        |-- 127.0.0.1
           /32 host LOCAL
        |-- 192.168.7.9
           /32 host LOCAL
"""


def test_network_without_an_address_of_this_host_is_rejected_with_its_addresses() -> None:
    with pytest.raises(InputError, match=r"203\.0\.113\.0/24: this host has no address in it.*127\.0\.0\.1"):
        check_network("203.0.113.0/24")


def test_host_with_nothing_but_a_loopback_is_rejected_with_a_command_that_helps() -> None:
    with pytest.raises(InputError, match="daemons need an interface besides the loopback") as caught:
        check_addresses("127.0.0.0/8", ["127.0.0.1"])
    assert "ip link add" in caught.value.remedy
    check_addresses("127.0.0.0/8", ["127.0.0.1", "192.0.2.1"])
