"""A program that ends with the process that started it: real ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import csdctl
from csdctl.emulation.limits import FLEET_VARIABLE, list_marked
from csdctl.transport.commands import build_child_command
from tests.patience import eventually

WAIT_FOR_CHILD = """
import os, subprocess, sys
from csdctl.transport.commands import build_child_command
subprocess.run(build_child_command(["sh", "-c", "echo started; exec sleep 3000"], os.getpid()))
"""


def test_program_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    sources = str(Path(csdctl.__file__).parents[1])
    environment = os.environ | {FLEET_VARIABLE: str(tmp_path), "PYTHONPATH": sources}
    command = [sys.executable, "-P", "-c", WAIT_FOR_CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"started\n"
        assert len(list_marked(str(tmp_path))) == 2
        parent.kill()
    assert eventually(lambda: not list_marked(str(tmp_path)))


@pytest.mark.parametrize(
    ("command", "parent", "code", "output", "error"),
    [
        (["sh", "-c", "echo out; echo err >&2; exit 7"], os.getpid(), 7, b"out\n", b"err\n"),
        (["no-such"], os.getpid(), 1, b"", b"no-such cannot be run: No such file or directory\n"),
        (["true"], 2**22 + 1, 1, b"", b"the process that started this program has ended\n"),
    ],
    ids=["its own", "not found", "no parent"],
)
def test_output_and_exit_code_are_those_of_the_program(
    command: list[str], parent: int, code: int, output: bytes, error: bytes
) -> None:
    done = subprocess.run(build_child_command(command, parent), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, output, error)
