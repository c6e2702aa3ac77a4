"""What a bare node answers, and which nodes are refused."""

import os
import subprocess
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError
from csdctl.transport.session import Completed
from csdctl.workflows.provision.machine import (
    MIB,
    NodeKind,
    build_probe,
    check_root,
    check_space,
    parse_machine,
)

ANSWER = """\
architecture=aarch64
bits=64
glibc=glibc 2.31
home=/root
user=0
installed=
free=4000000
"""


def completed(text: str) -> Completed:
    return Completed(("sh",), 0, text.encode(), b"", 0.1)


def test_node_without_python_gets_one_and_keeps_its_own_if_that_is_supported() -> None:
    machine = parse_machine("csd0", completed(ANSWER))
    assert machine.kind == NodeKind("aarch64", "3.11", sends_python=True)
    assert (machine.python, machine.home, machine.is_root) == ("", "/root", True)
    assert machine.free_bytes == 4_000_000 * 1024
    answer = ANSWER + "python=3.12 /usr/bin/python3\npython=3.14 /opt/python3.14\n"
    machine = parse_machine("csd0", completed(answer))
    assert machine.kind == NodeKind("aarch64", "3.12", sends_python=False)
    assert machine.python == "/usr/bin/python3"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("aarch64", "riscv64"), "its processor is riscv64; there are wheels only for 64-bit"),
        (("bits=64", "bits=32"), "its processor is aarch64 with 32-bit programs"),
        (("2.31", "2.27"), "its C library is glibc 2.27; the wheels of Open MPI need 2.28 or newer"),
        (("glibc 2.31", "musl libc (aarch64)"), "its C library is not glibc (musl libc (aarch64))"),
        (("glibc=glibc 2.31", "glibc="), "its C library is not glibc (no answer)"),
        ((ANSWER, ""), "the machine could not be inspected"),
    ],
)
def test_machine_without_wheels_is_refused_in_one_sentence(changed: tuple[str, str], message: str) -> None:
    with pytest.raises(CsdctlError) as caught:
        parse_machine("csd0", completed(ANSWER.replace(*changed)))
    assert message in caught.value.message
    assert caught.value.node == "csd0"
    assert caught.value.remedy


INTERRUPTED = "arrived=204800\nfree=614400\nfree=102400\n"
"""What an interrupted installation left, which counts as space."""
SEPARATE_HOME = "free_at_home=204800\n"
"""The home is another file system, where wheels need space."""


@pytest.mark.parametrize(
    ("answer", "fits", "too_much", "said"),
    [
        ("", (2700, 300), (4700, 300), "3906 MiB are free at /opt/csdctl, and 5000 MiB are needed"),
        (INTERRUPTED, (4500, 300), (4510, 300), "4606 MiB are free at /opt/csdctl, and 4610 MiB are needed"),
        (SEPARATE_HOME, (3900, 150), (3900, 250), "200 MiB are free at /root, and 250 MiB are needed"),
    ],
)
def test_full_disk_is_named_before_anything_is_sent(
    answer: str, fits: tuple[int, int], too_much: tuple[int, int], said: str
) -> None:
    machine = parse_machine("csd0", completed(ANSWER + answer))
    check_space(machine, *(size * MIB for size in fits), "/opt/csdctl")
    with pytest.raises(CsdctlError, match=said):
        check_space(machine, *(size * MIB for size in too_much), "/opt/csdctl")


def test_user_that_needs_a_password_for_sudo_is_told_what_to_allow() -> None:
    answer = ANSWER.replace("user=0", "user=1000\nlogin=train\nnot_root=sudo: a password is required")
    with pytest.raises(CsdctlError, match="train is not root there and has no passwordless sudo") as caught:
        check_root(parse_machine("csd0", completed(answer)))
    assert "train ALL=(ALL) NOPASSWD: ALL" in caught.value.remedy
    check_root(parse_machine("csd0", completed(ANSWER)))


def test_probe_runs_here_and_calls_sudo_for_a_user_that_ansible_calls_it_for(tmp_path: Path) -> None:
    (tmp_path / "sudo").write_text("#!/bin/sh\necho sudo: a password is required >&2\nexit 1\n")
    (tmp_path / "sudo").chmod(0o700)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    probe = build_probe("/opt/csdctl-none/below", "csd")
    done = subprocess.run(probe, capture_output=True, check=True, env=environment)
    machine = parse_machine("here", Completed(("sh",), 0, done.stdout, done.stderr, 0.1))
    assert machine.free_bytes > 0
    assert machine.installed == ""
    assert (machine.user, machine.not_root) == ("csd", "sudo: a password is required"), "also as id 0"
