"""What the lab requires of this machine, and whether it is available."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "dropbear": "dropbear-bin",
    "sysctl": "procps",
    "tcpdump": "tcpdump",
}
"""Debian's package of each program."""

LIBRARIES = {"faketime/libfaketime.so.1": "libfaketime"}
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/local/sbin"
LAB_DID_NOT_RUN = "the lab did not run"


def find_missing_packages() -> list[str]:
    """Return the Debian packages that are not installed here."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = {package for program, package in PACKAGES.items() if not shutil.which(program, path=path)}
    missing |= {package for file, package in LIBRARIES.items() if not any(Path("/usr/lib").glob(f"*/{file}"))}
    return sorted(missing)


def why_unavailable() -> str:
    """Return why the lab cannot run on this machine, whatever is installed; '' if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not shutil.which("apt-get"):
        return "needs Debian or a derivative"
    # Root in a container may lack the permission; only a trial shows.
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True
    )
    return "" if trial.returncode == 0 else "root may not create namespaces here (a container?)"


def require_lab() -> None:
    """Skip the test if the lab cannot run here, or fail for missing programs; extend PATH."""
    if reason := why_unavailable():
        pytest.skip(f"{LAB_DID_NOT_RUN}: {reason}")
    if packages := find_missing_packages():
        pytest.fail(f"the lab needs more programs: apt-get install {' '.join(packages)}", pytrace=False)
    os.environ["PATH"] = f"{os.environ['PATH']}:{SYSTEM_PATH}"
