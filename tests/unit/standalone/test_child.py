"""A program that ends with the process that started it: those that csdctl starts on the host, real ones."""

import os
import subprocess
from pathlib import Path

import pytest

from csdctl.emulation.limits import FLEET_VARIABLE, list_marked
from csdctl.transport.commands import build_child_command
from tests.patience import eventually
from tests.started_programs import start_and_kill


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


def test_programs_on_the_host_end_when_csdctl_is_killed(tmp_path: Path) -> None:
    mark = str(tmp_path)
    start_and_kill(str(tmp_path), **{FLEET_VARIABLE: mark})
    assert eventually(lambda: not list_marked(mark))
