"""Programs of this host that provisioning starts."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from csdctl.errors import CsdctlError
from csdctl.transport.commands import build_child_command


def find_program(name: str) -> str:
    """Return the path of a program, first of the one installed with csdctl; '' if there is none."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or ""


def run_to_end(
    command: Sequence[str], doing: str, deadline_s: float, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program of the host, which ends with csdctl, and return its output.

    Raises CsdctlError after the deadline.
    """
    try:
        return subprocess.run(
            build_child_command(command, os.getpid()),
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CsdctlError(
            f"{doing} did not finish in {deadline_s:.0f} s", remedy="check the network"
        ) from None
