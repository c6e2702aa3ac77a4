"""Needs of tests that a machine may not meet, and what provides them.

A test says so with `@pytest.mark.needs("root", "chromium")`, a fixture by calling `require("lab")`. Where it
is missing, the test is skipped, and the last lines of the session say the command that makes it run. A test
that finds out by trying calls `miss`. With CSDCTL_TESTS_REQUIRE_ALL set, as in CI, it fails instead.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from csdctl.emulation.limits import open_cgroup
from csdctl.worker.sandbox.seccomp_filter import ARCHITECTURES, MACHINE

REQUIRE_ALL = "CSDCTL_TESTS_REQUIRE_ALL"
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/local/sbin"
SYSTEM_PYTHON = "/usr/bin/python3"
AS_ROOT = "run `make test` as root on a machine where root may create namespaces"
USED = {
    "openssh-server": ("sshd",),
    "openssh-client": ("ssh",),
    "iproute2": ("ip", "tc"),
    "nftables": ("nft",),
    "dropbear-bin": ("dropbear",),
    "procps": ("sysctl",),
    "ksh93u+m": ("ksh",),
    "libfaketime": ("lib/*/faketime/libfaketime.so.1",),
    "fuse3": ("fusermount3",),
    "linux-libc-dev": ("include/asm-generic/unistd.h",),
}
"""Programs that tests use of Debian packages, or a file below /usr. Others have a program of their name."""
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
SHELLS = ("bash", "zsh", "fish", "dash", "busybox", "ksh93u+m", "mksh", "csh", "tcsh")
"""Debian packages with login shells."""


@dataclass(frozen=True)
class Need:
    """Something that a machine may lack."""

    packages: tuple[str, ...] = ()
    """Debian packages that bring it."""
    remedy: str = ""
    """Command that provides it, if no package does."""
    find_lack: Callable[[], str] = lambda: ""
    """Returns what the machine lacks besides packages, or ''."""
    is_required_in_ci: bool = True

    @property
    def missing_packages(self) -> list[str]:
        return [package for package in self.packages if not is_installed(package)]


def require(*names: str) -> None:
    """Skip the test, or fail where everything is required, if the machine lacks something."""
    for name in names:
        if lack := NEEDS[name].find_lack() or ", ".join(NEEDS[name].missing_packages):
            miss(name, lack)


def miss(name: str, lack: str) -> NoReturn:
    """Skip the test, or fail where everything is required: the machine lacks `lack` of the need `name`."""
    need = NEEDS[name]
    remedy = need.remedy or f"apt-get install {' '.join(need.missing_packages)}"
    reason = f"not run: needs {name} ({lack}) → {remedy}"
    if os.environ.get(REQUIRE_ALL) and need.is_required_in_ci:
        pytest.fail(f"{reason}, and {REQUIRE_ALL} is set", pytrace=False)
    pytest.skip(reason)


def is_installed(package: str) -> bool:
    """Return whether what tests use of a Debian package is here."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    used = USED.get(package, (package,))
    if "/" in used[0]:
        return any(Path("/usr").glob(used[0]))
    return all(shutil.which(program, path=path) for program in used)


def find_ansible(program: str) -> str | None:
    """Return the path of a program of Ansible, in this environment or else on the PATH."""
    return shutil.which(program, path=f"{sys.prefix}/bin:{os.environ.get('PATH', '')}")


def _lack_of_root() -> str:
    return "" if os.geteuid() == 0 else "this is an ordinary user"


@functools.cache
def _why_it_fails(*command: str) -> str:
    """Return what a command says when it fails, or ''. Only a trial shows what root may do in a container."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")
    except OSError as error:
        return str(error)
    return done.stderr.strip()[-200:] if done.returncode else ""


def _lack_of_namespaces() -> str:
    return _lack_of_root() or _why_it_fails("unshare", "--net", "--mount", "--pid", "--fork", "true")


def _lack_of_fuse() -> str:
    return _lack_of_namespaces() or ("" if os.access("/dev/fuse", os.W_OK) else "there is no /dev/fuse")


def _lack_of_python_for_all() -> str:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    return _why_it_fails(*(nobody if os.geteuid() == 0 else ()), SYSTEM_PYTHON, "-c", "")


@functools.cache
def _lack_of_cpu_cgroups() -> str:
    group = open_cgroup(f"csdctl-tests-{os.getpid()}", 0.5)
    if group is None:
        return "no control group with a CPU limit can be created"
    group.close()
    return ""


def _unless(condition: Callable[[], object], lack: str) -> Callable[[], str]:
    return lambda: "" if condition() else lack


NEEDS = {
    **{name: Need((name,)) for name in ("chromium", "tmux", *SHELLS)},
    "ssh": Need(("openssh-client",)),
    "kernel headers": Need(("linux-libc-dev",)),
    "lab": Need(LAB_PACKAGES, AS_ROOT, _lack_of_namespaces),
    "forgetful disk": Need(("fuse3",), AS_ROOT, _lack_of_fuse),
    "root": Need((), "run `make test` as root", _lack_of_root),
    "cpu cgroups": Need((), "run `make test` where control groups are writable", _lack_of_cpu_cgroups, False),
    "seccomp": Need(
        (),
        "run `make test` on x86_64 or aarch64",
        _unless(lambda: MACHINE in ARCHITECTURES, f"the filter knows no system calls of {MACHINE}"),
    ),
    "shared memory": Need(
        (),
        "mount -t tmpfs tmpfs /dev/shm",
        _unless(lambda: os.access("/dev/shm", os.W_OK), "/dev/shm is not writable"),
    ),
    "a Python for all users": Need((), f"install Debian's python3: {SYSTEM_PYTHON}", _lack_of_python_for_all),
    "csdctl for all users": Need((), "make the environment readable for all users"),
    "ansible": Need(
        (),
        "make setup",
        _unless(lambda: find_ansible("ansible"), "it is neither in this environment nor on the PATH"),
        False,
    ),
    "Debian's archive": Need(
        (),
        "run `make test` on Debian, with a network or a proxy for apt-get",
        _unless(lambda: shutil.which("apt-get"), "no apt-get"),
        False,
    ),
    "PyPI": Need((), "run `make test` with a network or a proxy for pip", is_required_in_ci=False),
}
"""Needs that only a test itself can find out about have no `find_lack`."""


if __name__ == "__main__":  # for .ci/run: what to install so that nothing is skipped
    print(" ".join(sorted({package for need in NEEDS.values() for package in need.missing_packages})))
