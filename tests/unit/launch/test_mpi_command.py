import os
import subprocess
from itertools import groupby
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME
from csdctl.launch.mpirun import RankCommand, build_mpirun_command, check_network, choose_prefix
from csdctl.worker.protocol.events import Exited, event_from_line

GOLDEN = Path(__file__).parent / "golden" / "mpirun_command"
RANKS = (
    RankCommand(0, HOST_NAME, ("/venv/bin/python", "-u", "w.pyz", "rank", "--spec", "s.json")),
    RankCommand(
        1, "csd0", ("python3", "-u", "w.pyz", "rank", "--spec", "s.json", "--marker", "csdctl-run=r/csd0")
    ),
    RankCommand(2, "csd1", ("/opt/my python/bin/python", "-u", "w.pyz", "rank", "--spec", "it's; $HOME `x`")),
)


def build(
    network: str = "10.1.1.0/24", ranks: tuple[RankCommand, ...] = RANKS, *, has_ipv4: bool = True
) -> list[str]:
    mpirun = Path("/venv/bin/mpirun")
    return build_mpirun_command(mpirun, "/opt/venv", network, ranks, run_id="20260101", has_ipv4=has_ipv4)


def contexts(command: list[str]) -> list[list[str]]:
    """Return the arguments of every application context, starting with --host."""
    rest = command[command.index("--host") :]
    return [[*words] for is_colon, words in groupby(rest, ":".__eq__) if not is_colon]


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


def run_context(words: list[str], home: Path) -> "subprocess.CompletedProcess[str]":
    """Run the arguments of a context as mpirun does, without a shell."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    return subprocess.run(words[4:], env=environment, capture_output=True, text=True, check=False)


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


@pytest.mark.parametrize(
    ("network", "of_ranks", "of_daemons"),
    [
        ("10.1.1.0/24", "10.1.1.0/24", "10.1.1.0/24"),
        ("", None, None),
        ("127.0.0.0/8", "127.0.0.0/8", None),  # PRRTE never uses the loopback
    ],
)
def test_network_is_passed_to_ranks_and_daemons(
    network: str, of_ranks: str | None, of_daemons: str | None
) -> None:
    command = build(network)
    assert after(command, "btl_tcp_if_include") == of_ranks
    assert after(command, "prte_if_include") == of_daemons
    assert "" not in command


@pytest.mark.parametrize(
    ("network", "has_ipv4", "disabled"),
    [("", True, "6"), ("", False, None), ("10.1.1.0/24", False, "6"), ("fd91::/64", True, "4")],
)
def test_ipv6_is_not_used_between_machines_that_reach_each_other_by_ipv4(
    network: str, has_ipv4: bool, disabled: str | None
) -> None:
    assert after(build(network, has_ipv4=has_ipv4), "btl_tcp_disable_family") == disabled


def test_network_that_this_host_cannot_use_is_rejected_with_its_addresses_or_a_command_that_helps() -> None:
    with pytest.raises(InputError, match=r"no address in 203\.0\.113\.0/24, it has .*127\.0\.0\.1"):
        check_network("203.0.113.0/24")
    with pytest.raises(InputError, match="only the loopback, expected another interface") as caught:
        check_network("127.0.0.0/8", ["127.0.0.1"])
    assert "ip link add" in caught.value.remedy
    check_network("127.0.0.0/8", ["127.0.0.1", "192.0.2.1"])


def test_prefixes_of_the_given_nodes_must_agree() -> None:
    facts = {name: Facts(name, prefix=f"/opt/{name}") for name in ("csd0", "csd1")}
    assert choose_prefix(["csd0"], facts) == "/opt/csd0"
    with pytest.raises(InputError, match="/opt/csd0, /opt/csd1"):
        choose_prefix(["csd0", "csd1"], facts)
