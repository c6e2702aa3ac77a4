"""Nodes whose file system is a bare Debian: an SSH server, and no Python.

The root is made once by mmdebstrap, in build/roots. A node for another processor runs by qemu-user, which the
kernel starts for its programs (binfmt_misc).
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from csdctl.fleet.model import Node
from tests.lab import network
from tests.lab.lab import Lab
from tests.lab.machines import INTERFACE, REPOSITORY, LabNode, NodeSpec
from tests.lab.network import run_command

ROOTS = REPOSITORY / "build" / "roots"
PREFIX = "/opt/csdctl"
PYTHON = f"{PREFIX}/venv/bin/python"
SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
ALLOWED_TO_CHANGE = ("proc", "sys", "dev", "run", "tmp")

_BOOT = """\
name=$1 root=$2 sys=$3; shift 3
hostname "$name"
mount --make-rprivate /
mount --bind "$root" /mnt
cd /mnt
mount -t proc proc proc
! "$sys" || mount -t sysfs sysfs sys
mount -t tmpfs tmpfs run; mkdir run/sshd
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts dev/pts
pivot_root . .
umount -l .
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
"""
# qemu-user shows every process the group 0 as its own, so that a shell cannot see that it leads its group.
# Here it never does: a shell of its own waits for it.
_EMULATED_SSHD = """\
SetEnv TMPDIR=/tmp QEMU_CPU=cortex-a53
ForceCommand bash -c "$SSH_ORIGINAL_COMMAND"; exit $?
"""


class BareNode(LabNode):
    """A node with a root of its own."""

    def __init__(self, spec: NodeSpec, lab: str, directory: Path, key: Path, *, architecture: str) -> None:
        self.tree = directory / spec.name / "root"
        self.tree.mkdir(parents=True)
        self._is_emulated = architecture == "arm64"
        run_command("tar", "-xf", str(make_root(architecture)), "-C", str(self.tree))
        super().__init__(spec, lab, directory, key)

    @property
    def node(self) -> Node:
        """The node as in fleet.yaml: with the Python that it is going to have."""
        return Node(self.name, self.spec.address, self.spec.port, key=self._key, python=PYTHON)

    def list_files(self) -> dict[str, str]:
        """Return every file with its mode, owner and content, without what a running system changes."""
        return dict(_describe(self.tree, path) for path in _walk(self.tree))

    def _boot_command(self) -> list[str]:
        return [
            *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL"),
            *("sh", "-eu", "-c", _BOOT, "boot", self.name, str(self.tree)),
            "false" if self._is_emulated else "true",  # /sys describes the processor of the host
            *("/usr/sbin/sshd", "-D", "-e"),
        ]

    def _write_files(self) -> None:
        self.directory.mkdir(exist_ok=True)
        key, ssh = self.directory / "host_key", self.tree / "etc/ssh"
        if key.exists():
            return
        run_command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(key))
        (ssh / "ssh_host_ed25519_key").write_text(key.read_text())
        (ssh / "ssh_host_ed25519_key").chmod(0o600)
        (ssh / "ssh_host_ed25519_key.pub").write_text(self.public_key)
        (self.tree / "root/.ssh").mkdir(mode=0o700)
        accepted = self.tree / "root/.ssh/authorized_keys"
        accepted.write_text(self._key.with_suffix(".pub").read_text())
        accepted.chmod(0o600)
        if self._is_emulated:
            (ssh / "sshd_config.d/10-emulated.conf").write_text(_EMULATED_SSHD)
        (self.tree / "etc/hosts").write_text(f"127.0.0.1 localhost {self.name}\n")


@contextmanager
def bare_node(lab: Lab, name: str, number: int, *, architecture: str = "amd64") -> Iterator[BareNode]:
    """Add a bare node to the lab for the duration of the block."""
    spec = NodeSpec(name, lab.front.ipv4(number))
    node = BareNode(spec, lab.name, lab.directory, lab.key, architecture=architecture)
    lab.nodes[name] = node
    network.connect_cable(node.namespace, INTERFACE, lab.front, f"p-{name}", (spec.address,))
    try:
        node.power_on()
        node.wait_until_up()
        yield node
    finally:
        del lab.nodes[name]
        node.remove()
        shutil.rmtree(node.directory)
        network.forget_neighbours(lab.front)


def make_root(architecture: str) -> Path:
    """Return the archive of a bare Debian of Debian's `architecture`, made now if there is none yet."""
    archive = ROOTS / f"{architecture}.tar"
    if not archive.exists():
        ROOTS.mkdir(parents=True, exist_ok=True)
        part = ROOTS / f".{architecture}-{os.getpid()}.tar"
        run_command(
            *("mmdebstrap", "--quiet", "--variant=minbase", "--include=openssh-server,iproute2"),
            *(f"--architectures={architecture}", SUITE, str(part), MIRROR),
        )
        part.rename(archive)
    return archive


def bundles() -> Path:
    """Return the directory of bundles that tests share."""
    directory = REPOSITORY / "build" / "bundles"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _walk(tree: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(tree):
        if Path(directory) == tree:
            names[:] = [name for name in names if name not in ALLOWED_TO_CHANGE]
        yield from (Path(directory) / name for name in sorted([*names, *files]))


def _describe(tree: Path, path: Path) -> tuple[str, str]:
    status = path.lstat()
    content = ""
    if path.is_symlink():
        content = os.readlink(path)
    elif path.is_file():
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    return str(path.relative_to(tree)), f"{status.st_mode:o} {status.st_uid} {status.st_gid} {content}"
