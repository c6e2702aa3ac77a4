"""What the lab needs of the machine; pure but for looking."""

import os
import shutil
import subprocess
from pathlib import Path

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
    """Debian's names of what is not installed here."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = {package for program, package in PACKAGES.items() if not shutil.which(program, path=path)}
    missing |= {package for file, package in LIBRARIES.items() if not any(Path("/usr/lib").glob(f"*/{file}"))}
    return sorted(missing)


def why_not_here() -> str:
    """Why the lab cannot be on this machine, whatever is installed; '' when it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not shutil.which("apt-get"):
        return "needs Debian, or a system made from it"
    # A container's root may lack the right; only trying tells.
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True
    )
    return "" if trial.returncode == 0 else "this root may not make namespaces (a container?)"
