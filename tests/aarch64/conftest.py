"""The lab, and the kernel's start of aarch64 programs by qemu-user."""

from pathlib import Path

import pytest

from tests.lab.conftest import lab, project
from tests.lab.network import run_command
from tests.provision.conftest import collect, tools

__all__ = ["lab", "project", "tools"]

BINFMT = Path("/proc/sys/fs/binfmt_misc")
RULE = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")


@pytest.fixture(scope="session")
def arm_bundle() -> Path:
    """Everything for bare aarch64 nodes; return the directory of bundles."""
    return collect("aarch64")


@pytest.fixture(scope="session", autouse=True)
def emulator() -> None:
    """Let the kernel start aarch64 programs, as Debian's package would at the next start of the machine."""
    if not RULE.exists():
        pytest.fail(
            "qemu-user-static is not installed: apt-get install qemu-user-static arch-test", pytrace=False
        )
    if not (BINFMT / "register").exists():
        run_command("mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT))
    if not (BINFMT / "qemu-aarch64").exists():
        (BINFMT / "register").write_text(RULE.read_text().strip())
