"""What some tests need of the machine, and what would give it to them.

A test says so with `@pytest.mark.needs("root", "chromium")`, a fixture by calling `require("lab")`. Where it
is missing, the test is skipped, and the last lines of the session say what did not run and the command that
makes it run. With CSDCTL_TESTS_REQUIRE_ALL set, as in CI, it fails instead.
"""

import functools
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from csdctl.emulation.cgroups import open_cgroup

REQUIRE_ALL = "CSDCTL_TESTS_REQUIRE_ALL"
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/local/sbin"
NOT_RUN = "not run: needs "


@dataclass(frozen=True)
class Need:
    """Something that a machine may lack: `find_lack` returns what, or ''."""

    find_lack: Callable[[], str]
    packages: tuple[str, ...] = ()
    """Debian packages that bring it."""
    remedy: str = ""
    """What brings it, if no package does."""
    is_required_in_ci: bool = True


def require(*names: str) -> None:
    """Skip the test, or fail where everything is required, if the machine lacks something."""
    for name in names:
        need = NEEDS[name]
        if lack := need.find_lack():
            reason = f"{NOT_RUN}{name} ({lack})"
            if os.environ.get(REQUIRE_ALL) and need.is_required_in_ci:
                pytest.fail(f"{reason}, and {REQUIRE_ALL} is set", pytrace=False)
            pytest.skip(reason)


def describe_skipped(reasons: Iterable[str]) -> list[str]:
    """Return the lines that say what did not run here, how often, and what makes it run."""
    lines, packages = [], set[str]()
    for reason, number in Counter(reasons).most_common():
        name = reason.removeprefix(NOT_RUN).partition(" (")[0] if reason.startswith(NOT_RUN) else ""
        need = NEEDS.get(name)
        remedy = f" → {need.remedy}" if need and need.remedy else ""
        lines.append(f"{number} {'tests' if number > 1 else 'test'} {reason}{remedy}")
        packages |= set(find_missing_packages(need)) if need else set()
    if packages:
        sudo = "" if os.geteuid() == 0 else "sudo "
        lines.append(f"To run them: {sudo}apt-get install {' '.join(sorted(packages))}, then the same again")
    return lines


def find_missing_packages(need: Need) -> list[str]:
    """Return those of the need's Debian packages that are not installed here."""
    return [package for package in need.packages if not is_installed(package)]


def is_installed(package: str) -> bool:
    """Return whether what tests use of a Debian package is here."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    used = USED[package]
    if "/" in used[0]:
        return any(Path("/usr/lib").glob(used[0]))
    return all(shutil.which(program, path=path) for program in used)


def _lacks_packages(*packages: str) -> Callable[[], str]:
    def find() -> str:
        return ", ".join(package for package in packages if not is_installed(package))

    return find


@functools.cache
def _find_lack_of_namespaces() -> str:
    if os.geteuid() != 0:
        return "root, for network namespaces"
    # Root in a container may lack the permission; only a trial shows.
    trial = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    try:
        done = subprocess.run(trial, check=False, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def _find_lack_of_lab() -> str:
    return _find_lack_of_namespaces() or _lacks_packages(*LAB_PACKAGES)()


def _find_lack_of_firewall() -> str:
    return _find_lack_of_namespaces() or _lacks_packages("iproute2", "nftables")()


@functools.cache
def _find_lack_of_mounts() -> str:
    if os.geteuid() != 0:
        return "this is an ordinary user"
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(trial, check=False, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


@functools.cache
def _find_lack_of_cpu_cgroups() -> str:
    group = open_cgroup(f"csdctl-tests-{os.getpid()}", 0.5)
    if group is None:
        return "no control group with a CPU limit can be created"
    group.close()
    return ""


def _find_lack_of_root() -> str:
    return "" if os.geteuid() == 0 else "this is an ordinary user"


def _find_lack_of_ordinary_user() -> str:
    return "" if os.geteuid() != 0 else "this is root"


USED = {
    "openssh-server": ("sshd",),
    "openssh-client": ("ssh",),
    "iproute2": ("ip", "tc"),
    "nftables": ("nft",),
    "dropbear-bin": ("dropbear",),
    "procps": ("sysctl",),
    "tcpdump": ("tcpdump",),
    "libfaketime": ("*/faketime/libfaketime.so.1",),
    "chromium": ("chromium",),
    "tmux": ("tmux",),
}
"""What tests use of each Debian package: programs, or a file below /usr/lib."""
LAB_PACKAGES = (
    "openssh-server",
    "openssh-client",
    "iproute2",
    "nftables",
    "dropbear-bin",
    "procps",
    "tcpdump",
    "libfaketime",
)
AS_ROOT = "run `make test` as root on a machine where root may create namespaces"
NEEDS = {
    "lab": Need(_find_lack_of_lab, LAB_PACKAGES, AS_ROOT),
    "namespaces": Need(_find_lack_of_namespaces, (), AS_ROOT),
    "mounts": Need(_find_lack_of_mounts, (), "run `make test` as root on a machine where root may mount"),
    "root": Need(_find_lack_of_root, (), "run `make test` as root"),
    "ordinary user": Need(_find_lack_of_ordinary_user, (), "run `make test` as an ordinary user", False),
    "chromium": Need(_lacks_packages("chromium"), ("chromium",)),
    "tmux": Need(_lacks_packages("tmux"), ("tmux",)),
    "firewall": Need(_find_lack_of_firewall, ("iproute2", "nftables"), AS_ROOT),
    "cpu cgroups": Need(
        _find_lack_of_cpu_cgroups,
        (),
        "run `make test` where control groups are writable",
        False,
    ),
    "ssh": Need(_lacks_packages("openssh-client"), ("openssh-client",)),
}
