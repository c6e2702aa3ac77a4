import os
import subprocess
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from csdctl.fleet.model import HOST_NAME
from csdctl.launch.mpi_job import ENDED
from csdctl.launch.mpirun import End, RankCommand, build_mpirun_command

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


@pytest.mark.parametrize(("ending", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_end_that_fails_is_reported_with_its_machine(tmp_path: Path, ending: str, code: int) -> None:
    ends = (ENDS[0], RankCommand(1, "csd-1.a_b", ("sh", "-c", ending), "x"))
    done = run_context(contexts(build(ends=ends))[1], tmp_path)
    assert done.returncode == code
    assert done.stdout == f"{ENDED}csd-1.a_b {code}\n"


def test_each_end_uses_the_interface_of_its_machine_and_starts_in_the_project_or_in_the_nodes_home(
    tmp_path: Path,
) -> None:
    show = ("sh", "-c", "echo $OMPI_MCA_btl_tcp_if_include $PWD")
    ends = (RankCommand(0, HOST_NAME, show, "eth0"), RankCommand(1, "csd0", show, "mpi3"))
    printed = [run_context(words, tmp_path).stdout for words in contexts(build(ends=ends))]
    assert printed == [f"eth0 {os.getcwd()}\n", f"mpi3 {tmp_path}\n"]


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
