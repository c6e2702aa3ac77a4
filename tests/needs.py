"""Needs of tests that a machine may not meet, and what provides them.

A test says so with `@pytest.mark.needs("root", "chromium")`, a fixture by calling `require("lab")`. Where it
is missing, the test is skipped, and the last lines of the session say what did not run and the command that
makes it run. A test that finds out by trying, as one that downloads something, calls `miss`. With
CSDCTL_TESTS_REQUIRE_ALL set, as in CI, it fails instead.
"""

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from csdctl.emulation.limits import open_cgroup

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
    """Command that provides it, if no package does."""
    is_required_in_ci: bool = True


def require(*names: str) -> None:
    """Skip the test, or fail where everything is required, if the machine lacks something."""
    for name in names:
        if lack := NEEDS[name].find_lack():
            miss(name, lack)


def miss(name: str, lack: str) -> NoReturn:
    """Skip the test, or fail where everything is required: the machine lacks `lack` of the need `name`."""
    reason = f"{NOT_RUN}{name} ({lack})"
    if os.environ.get(REQUIRE_ALL) and NEEDS[name].is_required_in_ci:
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
    used = USED.get(package, (package,))
    if "/" in used[0]:
        return any(Path("/usr/lib").glob(used[0]))
    return all(shutil.which(program, path=path) for program in used)


def _lacks_packages(*packages: str) -> Callable[[], str]:
    def find() -> str:
        return ", ".join(package for package in packages if not is_installed(package))

    return find


NEW_MOUNT = ("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt")


def _why_it_fails(*command: str) -> str:
    """Return what a command says when it fails, or ''; only a trial shows what root may do in a container."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")
    except OSError as error:
        return str(error)
    return done.stderr.strip()[-200:] if done.returncode else ""


def _find_lack_of_root() -> str:
    return "" if os.geteuid() == 0 else "this is an ordinary user"


@functools.cache
def _find_lack_of_namespaces() -> str:
    return _find_lack_of_root() or _why_it_fails(*["unshare", "--net", "--mount", "--pid", "--fork", "true"])


@functools.cache
def _find_lack_of_mounts() -> str:
    return _find_lack_of_root() or _why_it_fails(*NEW_MOUNT)


@functools.cache
def _find_lack_of_python_for_all() -> str:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    return _why_it_fails(*(nobody if os.geteuid() == 0 else ()), SYSTEM_PYTHON, "-c", "")


@functools.cache
def _find_lack_of_cpu_cgroups() -> str:
    group = open_cgroup(f"csdctl-tests-{os.getpid()}", 0.5)
    if group is None:
        return "no control group with a CPU limit can be created"
    group.close()
    return ""


def _without_permission(name: str, attempt: Callable[[], object]) -> Callable[[], str]:
    """Return a function that says why `attempt` is not permitted; it tries once."""

    @functools.cache
    def find() -> str:
        try:
            attempt()
        except PermissionError as error:
            return f"{name}: {error.strerror}"
        return ""

    return find


def _make_device() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.mknod(f"{directory}/null", 0o020666, os.makedev(1, 3))


def _open_packet_socket() -> None:
    socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM).close()


def _attach_filter() -> None:
    from csdctl.worker.sandbox.seccomp_filter import FilterProgram

    with socket.socket() as filtered:
        filtered.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, FilterProgram([(0x06, 0, 0, 0)]).header)


def _find_lack_of_seccomp() -> str:
    from csdctl.worker.sandbox.seccomp_filter import ARCHITECTURES, MACHINE

    return "" if MACHINE in ARCHITECTURES else f"the filter knows no system calls of {MACHINE}"


def find_ansible(program: str) -> str | None:
    """Return the path of a program of Ansible: that of this environment, or else on the PATH."""
    return shutil.which(program, path=f"{sys.prefix}/bin:{os.environ.get('PATH', '')}")


def _unless(condition: Callable[[], object], lack: str) -> Callable[[], str]:
    return lambda: "" if condition() else lack


_SHOWN_BY_THE_TEST = _unless(lambda: True, "")
"""Only the test itself shows it, and calls `miss`."""


USED = {
    "openssh-server": ("sshd",),
    "openssh-client": ("ssh",),
    "iproute2": ("ip", "tc"),
    "nftables": ("nft",),
    "dropbear-bin": ("dropbear",),
    "procps": ("sysctl",),
    "ksh93u+m": ("ksh",),
    "libfaketime": ("*/faketime/libfaketime.so.1",),
}
"""Programs that tests use of Debian packages, or a file below /usr/lib; of others, that of the same name."""
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
SYSTEM_PYTHON = "/usr/bin/python3"
SO_ATTACH_FILTER = 26
AS_ROOT = "run `make test` as root on a machine where root may create namespaces"
NEEDS = {
    "lab": Need(
        lambda: _find_lack_of_namespaces() or _lacks_packages(*LAB_PACKAGES)(), LAB_PACKAGES, AS_ROOT
    ),
    "namespaces": Need(_find_lack_of_namespaces, (), AS_ROOT),
    "mounts": Need(_find_lack_of_mounts, (), "run `make test` as root on a machine where root may mount"),
    "root": Need(_find_lack_of_root, (), "run `make test` as root"),
    "ordinary user": Need(
        _unless(os.geteuid, "this is root"), (), "run `make test` as an ordinary user", False
    ),
    "chromium": Need(_lacks_packages("chromium"), ("chromium",)),
    **{name: Need(_lacks_packages(name), (name,)) for name in ("tmux", "jq", *SHELLS)},
    "firewall": Need(
        lambda: _find_lack_of_namespaces() or _lacks_packages("iproute2", "nftables")(),
        ("iproute2", "nftables"),
        AS_ROOT,
    ),
    "cpu cgroups": Need(
        _find_lack_of_cpu_cgroups, (), "run `make test` where control groups are writable", False
    ),
    "devices": Need(
        _without_permission("mknod", _make_device),
        (),
        "run `make test` as root on a machine where root may make devices",
    ),
    "packets": Need(_without_permission("AF_PACKET", _open_packet_socket), (), "run `make test` as root"),
    "socket filters": Need(
        _without_permission("SO_ATTACH_FILTER", _attach_filter), (), "run `make test` as root"
    ),
    "seccomp": Need(_find_lack_of_seccomp, (), "run `make test` on x86_64 or aarch64"),
    "kernel headers": Need(
        _unless(lambda: os.access("/usr/include/asm-generic/unistd.h", os.R_OK), "no asm-generic/unistd.h"),
        ("linux-libc-dev",),
    ),
    "shared memory": Need(
        _unless(lambda: os.access("/dev/shm", os.W_OK), "/dev/shm is not writable"),
        (),
        "mount -t tmpfs tmpfs /dev/shm",
    ),
    "a Python for all users": Need(
        _find_lack_of_python_for_all, (), f"install Debian's python3: {SYSTEM_PYTHON}"
    ),
    "csdctl for all users": Need(_SHOWN_BY_THE_TEST, (), "make the environment readable for all users"),
    "sshd": Need(_lacks_packages("openssh-server"), ("openssh-server",)),
    "dropbear": Need(_lacks_packages("dropbear-bin"), ("dropbear-bin",)),
    "ansible": Need(
        _unless(lambda: find_ansible("ansible"), "it is neither in this environment nor on the PATH"),
        (),
        "make setup",
        False,
    ),
    "Debian's archive": Need(
        _unless(lambda: shutil.which("apt-get"), "no apt-get"),
        (),
        "run `make test` on Debian, with a network or a proxy for apt-get",
        False,
    ),
    "PyPI": Need(_SHOWN_BY_THE_TEST, (), "run `make test` with a network or a proxy for pip", False),
    "ssh": Need(_lacks_packages("openssh-client"), ("openssh-client",)),
}


if __name__ == "__main__":  # for .ci/run: what to install so that nothing is skipped
    print(" ".join(sorted({package for need in NEEDS.values() for package in find_missing_packages(need)})))
