"""Download the wheels of nodes with another processor, by a lock file with hashes."""

import sys
from collections.abc import Sequence
from pathlib import Path

from csdctl.documents import load_text, save_text
from csdctl.errors import CsdctlError, InputError
from csdctl.workflows.provision.machine import Kind
from csdctl.workflows.provision.programs import run_to_end
from csdctl.workflows.provision.trimming import UNUSED_PACKAGES

LOCK = Path(__file__).with_name("node.lock")
"""Every package that a rank imports, with the hashes of its wheels for all processors (`make lock`)."""

# What glibc 2.28 and everything older runs. pip takes exactly the tags it is given.
_TAGS = (
    *(f"manylinux_2_{minor}" for minor in range(28, 4, -1)),
    *("manylinux2014", "manylinux2010", "manylinux1"),
)
DOWNLOAD_DEADLINE_S = 3600.0


def select_locked(lock: str, kind: Kind, unused: Sequence[str] = UNUSED_PACKAGES) -> list[str]:
    """Return the lines of a lock file that apply to `kind`, without markers; pure.

    Raises InputError for a line without a hash.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    environment = {
        "platform_machine": kind.architecture,
        "python_version": kind.python,
        "python_full_version": f"{kind.python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    selected = []
    for line in lock.replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        written, _, hashes = line.partition(" --hash=")
        try:
            requirement = Requirement(written.strip())
        except InvalidRequirement as error:
            raise InputError(f"the lock file has {written.strip()[:80]!r}: {error}") from None
        if not hashes:
            raise InputError(
                f"the lock file has no hash for {requirement.name}",
                remedy="write it with `uv pip compile --generate-hashes` or `pip-compile --generate-hashes`",
            )
        is_applied = requirement.marker is None or requirement.marker.evaluate(environment)
        if is_applied and requirement.name not in unused:
            selected.append(f"{requirement.name}{requirement.specifier} --hash={' '.join(hashes.split())}")
    return selected


def build_download_command(requirements: Path, kind: Kind, directory: Path) -> list[str]:
    """Return the argument list of pip; pure."""
    digits = kind.python.replace(".", "")
    platforms = [word for tag in _TAGS for word in ("--platform", f"{tag}_{kind.architecture}")]
    abis = [word for abi in (f"cp{digits}", "abi3", "none") for word in ("--abi", abi)]
    return [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"),
        *("--no-deps", "--only-binary=:all:", "--require-hashes", "--implementation", "cp"),
        *("--python-version", kind.python, *abis, *platforms),
        *("--requirement", str(requirements), "--dest", str(directory)),
    ]


def download_wheels(lock: Path, kind: Kind, directory: Path) -> list[Path]:
    """Download the wheels of `lock` for `kind` into `directory`; return them by name.

    Raises CsdctlError with pip's own message.
    """
    requirements = directory / "requirements.txt"
    save_text(requirements, "\n".join(select_locked(load_text(lock), kind)) + "\n")
    command = build_download_command(requirements, kind, directory)
    done = run_to_end(command, "pip", DOWNLOAD_DEADLINE_S)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        cause = (errors or done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CsdctlError(
            f"pip cannot download the wheels for {kind.architecture} and Python {kind.python}: {cause}",
            remedy="check that this host reaches the package index; or collect elsewhere, and copy --bundles",
        )
    return sorted(directory.glob("*.whl"))
