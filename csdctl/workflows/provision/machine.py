"""Facts of a bare node, before anything is installed there: one `sh` program, and its judgement. Pure.

The node needs no Python for this.
"""

import shlex
from dataclasses import dataclass

from csdctl.errors import NodeError, RemoteCommandError
from csdctl.fleet.checks import MIB, MIN_GLIBC
from csdctl.transport.session import Completed, bounded

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The processors that TensorFlow and Open MPI have wheels for, and Debian's name of each."""

PYTHONS = ("3.11", "3.12", "3.13")
SENT_PYTHON = "3.11"
"""The Python that is sent to a node without a suitable one."""

# A Python counts if it can create virtual environments. Only the nearest existing directory has free space.
# Remains of an interrupted installation are removed by the next one; wheels that arrived are not sent again.
_PROBE = """\
prefix=$1
echo "architecture=$(uname -m)"
echo "bits=$(getconf LONG_BIT 2>/dev/null)"
libc() {  # a minimal system has neither getconf nor ldd, and its C library prints its version
  for file in /lib64/libc.so.6 /lib/libc.so.6 /usr/lib/libc.so.6 /lib/*-linux-gnu/libc.so.6; do
    [ -x "$file" ] && "$file" | sed -n '1s/.*version \\([0-9.]*[0-9]\\).*/glibc \\1/p' && break
  done
}
echo "glibc=$( (getconf GNU_LIBC_VERSION || ldd --version || libc) 2>/dev/null | head -n 1)"
echo "home=$PWD"
echo "user=$(id -u)"
echo "login=${2:-$(id -un)}"
{ [ "$(id -u)" = 0 ] && [ -z "$2" ]; } || sudo -n true 2>/dev/null ||
  echo "not_root=$(sudo -n true 2>&1 | tail -n 1)"
for python in python3.13 python3.12 python3.11 python3; do
  path=$(command -v "$python") || continue
  program='import sys, venv, ssl; print("%d.%d" % sys.version_info[:2])'
  version=$("$path" -I -c "$program" 2>/dev/null) || continue
  echo "python=$version $path"
done
echo "installed=$(cat "$prefix/venv/csdctl-bundle" 2>/dev/null)"
directory=$prefix
while [ ! -d "$directory" ]; do directory=$(dirname "$directory"); done
free_at() { df -Pk "$1" | tail -n 1 | tr -s ' ' | cut -d ' ' -f 4; }
echo "free=$(free_at "$directory")"
[ "$(stat -c %d .)" = "$(stat -c %d "$directory")" ] || echo "free_at_home=$(free_at .)"
for part in "$prefix"/*; do
  case ${part##*/} in venv|venv-????????????|python-*|'*') ;; *) echo "foreign=${part##*/}";; esac
done
echo "arrived=$(du -skL "$HOME/csdctl-wheels" 2>/dev/null | cut -f 1)"
for part in "$prefix"/python-*.part "$prefix"/venv-*; do
  [ -d "$part" ] && [ ! -e "$part/csdctl-bundle" ] || continue
  echo "free=$(du -sk "$part" 2>/dev/null | cut -f 1)"
done
"""


@dataclass(frozen=True)
class NodeKind:
    """The properties of a node that its wheels depend on. Nodes of one kind get the same files."""

    architecture: str
    python: str
    sends_python: bool

    @property
    def name(self) -> str:
        """A name for directories: aarch64-python3.11-sent."""
        return f"{self.architecture}-python{self.python}" + ("-sent" if self.sends_python else "")


@dataclass(frozen=True)
class BareMachine:
    """The answer of one node."""

    name: str
    kind: NodeKind
    python: str
    """The path of its own Python; '' if Python is sent."""
    home: str
    is_root: bool
    free_bytes: int
    """Free on the file system of the prefix, with what an interrupted installation left below the prefix."""
    installed: str
    """The id of the bundle that is installed there, or ''."""
    user: str = ""
    not_root: str = ""
    """Why its user may not do what root may, in the words of sudo; '' if it may."""
    home_free_bytes: int | None = None
    """Free on the file system of its home; None if that is also the file system of the prefix."""
    arrived_bytes: int = 0
    """Wheels that are in its home already."""
    foreign: tuple[str, ...] = ()


def build_probe(prefix: str, user: str = "") -> list[str]:
    """Return the arguments of the probe for `prefix`. Ansible calls sudo for `user`, even if that is root."""
    return ["sh", "-c", _PROBE, "csdctl-probe", prefix, user]


def parse_machine(name: str, completed: Completed) -> BareMachine:
    """Return what the node answered. Raises NodeError for a machine without wheels."""
    values: dict[str, list[str]] = {}
    for line in completed.output.splitlines():
        key, _, value = line.partition("=")
        values.setdefault(key, []).append(value.strip())

    def first(key: str) -> str:
        return values.get(key, [""])[0]

    def add_up(key: str) -> int:
        return sum(int(text) * 1024 for text in values.get(key, ()) if text.isdigit())

    if completed.exit_code or not first("architecture"):
        cause = completed.last_error_line or f"exit code {completed.exit_code}"
        problem = f"the machine could not be inspected: {cause}"
        raise RemoteCommandError(problem, node=name, remedy="run `uname -m` there")
    architecture, is_32_bit = first("architecture"), first("bits") == "32"
    if architecture not in ARCHITECTURES or is_32_bit:
        raise NodeError(
            f"its processor is {bounded(architecture)}{' with 32-bit programs' * is_32_bit}; "
            f"there are wheels only for 64-bit {' and '.join(ARCHITECTURES)}",
            node=name,
            remedy="install a 64-bit system there, or leave the node out: --exclude",
        )
    _check_glibc(name, first("glibc"))
    answers = [text.partition(" ") for text in reversed(values.get("python", []))]
    pythons = {version: path for version, _, path in answers}
    version = next((python for python in PYTHONS if python in pythons), "")
    return BareMachine(
        name=name,
        kind=NodeKind(architecture, version or SENT_PYTHON, sends_python=not version),
        python=pythons.get(version, ""),
        home=first("home"),
        is_root=first("user") == "0",
        free_bytes=add_up("free"),
        installed=bounded(first("installed")),
        user=bounded(first("login")),
        not_root=bounded(first("not_root")),
        home_free_bytes=add_up("free_at_home") if "free_at_home" in values else None,
        arrived_bytes=add_up("arrived"),
        foreign=tuple(map(bounded, values.get("foreign", []))),
    )


def check_prefix(machine: BareMachine, prefix: str) -> None:
    """Raise NodeError when the directory of the installation has files of others."""
    if machine.foreign:
        problem = f"{prefix} has files that are not csdctl's: {', '.join(machine.foreign[:3])}"
        remedy = f"install into a directory of its own: --prefix {prefix}/csdctl"
        raise NodeError(problem, node=machine.name, remedy=remedy)


def check_root(machine: BareMachine) -> None:
    """Raise NodeError when its user may not install anything outside of its home."""
    if machine.not_root:
        user = machine.user or "USER"
        problem = f"user {user} is not root there and has no passwordless sudo ({machine.not_root})"
        rule = f"`{user} ALL=(ALL) NOPASSWD: ALL` in /etc/sudoers.d/csdctl there"
        remedy = f"allow it, with {rule}, or set `user: root` in the fleet file"
        raise NodeError(problem, node=machine.name, remedy=remedy)


def check_space(machine: BareMachine, unpacked_bytes: int, wheel_bytes: int, prefix: str) -> None:
    """Raise NodeError if the disk of prefix or home is too small, beside what an earlier call left."""
    missing_bytes = max(0, wheel_bytes - machine.arrived_bytes)
    if machine.home_free_bytes is None:
        needs = [(prefix, machine.free_bytes, unpacked_bytes + missing_bytes)]
    else:
        needs = [(machine.home, machine.home_free_bytes, missing_bytes)]
        needs.append((prefix, machine.free_bytes, unpacked_bytes))
    for place, free_bytes, needed_bytes in needs:
        if free_bytes < needed_bytes:
            problem = f"{free_bytes // MIB} MiB are free at {place}, and {needed_bytes // MIB} MiB are needed"
            remedy = f"free space there (`df -h {shlex.quote(place)}`)"
            remedy += ", or install elsewhere: --prefix" if place == prefix else ""
            raise NodeError(problem, node=machine.name, remedy=remedy)


def _check_glibc(name: str, answer: str) -> None:
    words = answer.split()
    numbers = words[-1].split(".")[:2] if words else []
    expected = ".".join(map(str, MIN_GLIBC))
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        problem = f"is not glibc ({bounded(answer) or 'no answer'}), expected {expected} or newer"
        remedy = "install a system with glibc there, or leave the node out: --exclude"
        raise NodeError(f"its C library {problem}", node=name, remedy=remedy)
    if tuple(map(int, numbers)) < MIN_GLIBC:
        problem = f"is glibc {'.'.join(numbers)}; the wheels of Open MPI need {expected} or newer"
        remedy = "install a newer system there (Debian 10, RHEL 8), or leave it out: --exclude"
        raise NodeError(f"its C library {problem}", node=name, remedy=remedy)
