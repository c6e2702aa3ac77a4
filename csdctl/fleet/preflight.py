"""Check from facts whether machines have the software that a rank needs; pure."""

from collections.abc import Iterable

from csdctl.errors import CsdctlError, NodeError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet

INSTALL = (
    "install csdctl's requirements there (docs/how-to/add-a-node.md), or fix `python:` in the fleet file"
)


def check_machines(fleet: Fleet, facts: Iterable[Facts]) -> None:
    """Raise one error that lists all machines without Python, TensorFlow or MPI, and what is missing."""
    missing = {machine.name: what for machine in facts if (what := _find_missing(fleet, machine))}
    if len(missing) == 1:
        [(name, what)] = missing.items()
        raise NodeError(what, node=name, remedy=INSTALL)
    if missing:
        listed = "\n".join(f"  {name}: {what}" for name, what in missing.items())
        raise CsdctlError(f"{len(missing)} machines cannot train:\n{listed}", remedy=INSTALL)


def is_ready(facts: Facts) -> bool:
    """Return whether a rank can run there: no problem, and all software installed."""
    software = (facts.python_version, facts.tensorflow_version, facts.mpi_version, facts.mpi4py_version)
    return not facts.problem and all(software)


def _find_missing(fleet: Fleet, facts: Facts) -> str:
    python = "its Python" if facts.name == HOST_NAME else fleet.node(facts.name).python
    if facts.problem:
        return facts.problem
    if not facts.python_version:
        return f"{python!r} is not a working Python"
    found = {
        "tensorflow": facts.tensorflow_version,
        "openmpi": facts.mpi_version,
        "mpi4py": facts.mpi4py_version,
    }
    missing = [name for name, version in found.items() if not version]
    return f"{python} has no {', '.join(missing)}" if missing else ""
