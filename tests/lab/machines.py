"""The lab's nodes, each with a real SSH server.

A node has its own namespaces for network, processes, mounts, hostname and shared memory, and thus its own
home, /tmp and processes. Its SSH server is process 1: killing it ends everything at once, like a power cut. A
node ends with the process that created it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from csdctl.emulation.limits import CgroupLimit, open_cgroup
from csdctl.fleet.model import Node
from tests.lab import network
from tests.lab.network import DIES_WITH_PARENT, run_command, run_ip
from tests.patience import eventually

INTERFACE = "csd"
REPOSITORY = Path(__file__).parents[2]
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), "")
COVERED = (Path("/root"), Path("/tmp"), Path("/run"))

# Process 1 of a node. Paths under mount points that get covered (a Python in /root, a repository in /tmp) are
# bind-mounted elsewhere first.
_BOOT = """\
name=$1 place=$2 home=$3; shift 3
hostname "$name"
kept=0
while [ "$1" != -- ]; do
  kept=$((kept + 1)); mkdir -p "$place/kept/$kept"; mount --rbind "$1" "$place/kept/$kept"
  eval "kept_$kept=\\$1"; shift
done; shift
case $home in
  tiny) mount -t tmpfs -o size=1m,mode=700 tmpfs /root ;;
  *) mount --bind "$home" /root ;;
esac
if [ -e "$place/passwd" ]; then mount --bind "$place/passwd" /etc/passwd; fi
mount --bind "$place/tmp" /tmp
mount -t tmpfs -o mode=755 tmpfs /run; mkdir /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount --bind "$place/shadow" /etc/shadow
while [ "$kept" -gt 0 ]; do
  eval "path=\\$kept_$kept"; mkdir -p "$path"; mount --rbind "$place/kept/$kept" "$path"; kept=$((kept - 1))
done
if [ -e "$place/read-only" ]; then mount -o remount,ro,bind /root; fi
cd /
exec "$@"
"""


@dataclass(frozen=True)
class NodeSpec:
    """The configuration of a node."""

    name: str
    address: str
    other_addresses: tuple[str, ...] = ()
    port: int = 22
    sshd: tuple[str, ...] = ()
    """Lines for its sshd_config; they replace default lines with the same keyword."""
    server: str = "openssh"
    has_sftp: bool = True
    home: str = "disk"
    """disk, read-only, tiny: 1 MiB, or the name of a node with the same home."""
    login_shell: str = ""
    """The login shell of root, if another one than this machine's."""
    start_up: str = ""
    """Content of its ~/.bashrc, which bash reads when started by sshd, and of ~/.cshrc."""
    cpu: float | None = None
    clock: str = ""
    """The offset of its clock for libfaketime: '-1d'."""


class LabNode:
    """One node; its namespace and cable exist from the start, `power_on` starts it."""

    def __init__(self, spec: NodeSpec, lab: str, directory: Path, key: Path) -> None:
        self.spec = spec
        self.name = spec.name
        self.namespace = f"{lab}-{spec.name}"
        self.directory = directory / spec.name
        self._key = key
        self._process: subprocess.Popen[bytes] | None = None
        self._cgroup: CgroupLimit | None = None
        network.make_namespace(self.namespace)
        self._write_files()

    @property
    def node(self) -> Node:
        """The node as in fleet.yaml."""
        spec = self.spec
        faked = tuple(
            (name, value)
            for name, _, value in (variable.partition("=") for variable in self._clock_variables())
        )
        return Node(self.name, spec.address, spec.port, key=self._key, python=sys.executable, env=faked)

    @property
    def root(self) -> Path:
        """The root of the node's file system."""
        return Path(f"/proc/{self.first_process()}/root")

    @property
    def home(self) -> Path:
        return self.root / "root"

    @property
    def public_key(self) -> str:
        return (self.directory / "host_key.pub").read_text()

    @property
    def known_hosts_line(self) -> str:
        place = self.spec.address
        return f"{place if self.spec.port == 22 else f'[{place}]:{self.spec.port}'} {self.public_key}"

    @property
    def log(self) -> str:
        """The log of its SSH server."""
        return (self.directory / "log").read_text(errors="replace")

    def power_on(self) -> None:
        """Start it; `wait_until_up` waits for it."""
        (self.directory / "log").write_text("")
        if self.spec.cpu and not self._cgroup:
            self._cgroup = open_cgroup(self.namespace, self.spec.cpu)
            assert self._cgroup, "this system allows no control group for the CPU"
        command = [
            *DIES_WITH_PARENT,
            *("nsenter", f"--net={network.NAMESPACES / self.namespace}"),
            *self._boot_command(),
        ]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._cgroup.build_command(command) if self._cgroup else command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            )

    def wait_until_up(self) -> None:
        """Wait until its SSH server listens; raises RuntimeError with its log."""
        process = self._process
        assert process
        ready = "Not backgrounding" if self.spec.server == "dropbear" else "Server listening"
        eventually(lambda: ready in self.log or process.poll() is not None, lambda: self.log)
        if ready not in self.log:
            raise RuntimeError(f"{self.name} does not start: {self.log}")

    def power_off(self) -> None:
        """Kill all its processes at once, without closing connections."""
        self._set_cable("down")
        self._end()

    def restart(self, **changes: object) -> None:
        """Restart it with a changed configuration."""
        self._end()
        self.spec = replace(self.spec, **changes)  # type: ignore[arg-type]
        self._write_files()
        self.power_on()
        self.wait_until_up()
        self._set_cable("up")

    def remove(self) -> None:
        """End it and remove everything of it."""
        self._end()
        with suppress(RuntimeError):  # there is none
            # With its namespace, the kernel removes it later, and the next node of this name has no cable.
            run_ip(self.namespace, f"link del {INTERFACE}")
        network.remove_namespace(self.namespace)
        if self._cgroup:
            self._cgroup.close()

    def run(self, *command: str) -> str:
        """Run `command` on the node without SSH and return its output."""
        return run_command("nsenter", "-t", str(self.first_process()), "--all", *command)

    def commands(self) -> list[str]:
        """Return the command lines of all processes there except its SSH server."""
        commands = []
        for pid in network.list_processes(self.namespace):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if line and not line.startswith(("sshd:", "/usr/sbin/dropbear", "unshare ")):
                commands.append(line.strip())
        return commands

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """No power: the node does not even answer ARP requests."""
        self.power_off()
        try:
            yield
        finally:
            self.restart()

    @contextmanager
    def cable_pulled(self) -> Iterator[None]:
        self._set_cable("down")
        try:
            yield
        finally:
            self._set_cable("up")

    @contextmanager
    def packets_swallowed(self) -> Iterator[None]:
        """The node has its address but drops all incoming packets."""
        self._nft(
            "add table inet lab",
            "add chain inet lab input { type filter hook input priority 0; policy drop; }",
        )
        try:
            yield
        finally:
            self._nft("delete table inet lab")

    @contextmanager
    def packets_lost(self, each: int) -> Iterator[None]:
        """The node loses one of `each` incoming packets, at random."""
        self._nft(
            "add table inet lab",
            "add chain inet lab input { type filter hook input priority 0; }",
            f"add rule inet lab input numgen random mod {each} == 0 drop",
        )
        try:
            yield
        finally:
            self._nft("delete table inet lab")

    @contextmanager
    def server_stopped(self) -> Iterator[None]:
        """The kernel accepts connections, but the server never responds."""
        with _stopped([self.first_process()]):
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Every process is stopped; the kernel still acknowledges packets."""
        with _stopped(network.list_processes(self.namespace)):
            yield

    @contextmanager
    def another_host_key(self) -> Iterator[None]:
        """The node was reinstalled, or another machine has its address."""
        files = {name: (self.directory / name).read_bytes() for name in ("host_key", "host_key.pub")}
        for name in files:
            (self.directory / name).unlink()
        self.restart()
        try:
            yield
        finally:
            for name, content in files.items():
                (self.directory / name).write_bytes(content)
            self.restart()

    @contextmanager
    def with_sshd(self, *lines: str) -> Iterator[None]:
        """Restart its server with these lines in sshd_config."""
        before = self.spec.sshd
        self.restart(sshd=(*lines, *before))
        try:
            yield
        finally:
            self.restart(sshd=before)

    def _set_cable(self, state: str) -> None:
        run_ip(self.namespace, f"link set {INTERFACE} {state}")
        # A link loses its IPv6 addresses when it goes down.
        if state == "up":
            lost = [address for address in (self.spec.address, *self.spec.other_addresses) if ":" in address]
            present = run_command("ip", "-n", self.namespace, "addr", "show", "dev", INTERFACE)
            network.give_addresses(
                self.namespace, INTERFACE, [address for address in lost if address not in present]
            )

    def _nft(self, *lines: str) -> None:
        nft = ("nsenter", f"--net={network.NAMESPACES / self.namespace}", "nft", "-f", "-")
        run_command(*nft, input_text="\n".join(lines) + "\n")

    def first_process(self) -> int:
        """Return its process 1, as this machine numbers it."""
        assert self._process, f"{self.name} is off"
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
        network.end_all(lambda: network.list_processes(self.namespace))

    def _home_directory(self) -> Path:
        is_shared = self.spec.home not in ("disk", "read-only", "tiny")
        return (self.directory.parent / self.spec.home if is_shared else self.directory) / "home"

    def _clock_variables(self) -> list[str]:
        return [f"LD_PRELOAD={FAKETIME}", f"FAKETIME={self.spec.clock}"] if self.spec.clock else []

    def _boot_command(self) -> list[str]:
        home = "tiny" if self.spec.home == "tiny" else str(self._home_directory())
        return [
            *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
            *("sh", "-eu", "-c", _BOOT, "boot", self.name, str(self.directory), home),
            *(*_kept_paths(), "--", *self._server_command()),
        ]

    def _server_command(self) -> list[str]:
        if self.spec.server == "dropbear":
            place = str(self.directory / "dropbear_key")
            return ["/usr/sbin/dropbear", "-F", "-E", "-s", "-r", place, "-p", str(self.spec.port)]
        return ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.directory / "sshd_config")]

    def _write_files(self) -> None:
        home, key = self._home_directory(), self.directory / "host_key"
        (home / ".ssh").mkdir(parents=True, exist_ok=True, mode=0o700)
        home.chmod(0o700)
        (self.directory / "tmp").mkdir(parents=True, exist_ok=True)
        (self.directory / "tmp").chmod(0o1777)
        (self.directory / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        if not key.exists():
            run_command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(key))
        if self.spec.server == "dropbear":
            run_command("dropbearconvert", "openssh", "dropbear", str(key), f"{self.directory}/dropbear_key")
        (home / ".ssh" / "authorized_keys").write_text(self._key.with_suffix(".pub").read_text())
        for name in (".bashrc", ".cshrc"):
            (home / name).write_text(self.spec.start_up)
        passwd = self.directory / "passwd"
        if self.spec.login_shell:
            accounts = Path("/etc/passwd").read_text().partition("\n")[2]
            text = f"root:x:0:0:root:/root:{self.spec.login_shell}\n{accounts}"
            passwd.write_text(text, errors="surrogateescape")
        if self.spec.home == "read-only":
            (self.directory / "read-only").touch()
        (self.directory / "sshd_config").write_text("\n".join([*self.spec.sshd, *self._sshd_lines()]) + "\n")

    def _sshd_lines(self) -> list[str]:
        lines = [
            f"Port {self.spec.port}",
            f"HostKey {self.directory / 'host_key'}",
            f"AuthorizedKeysFile {self._home_directory() / '.ssh/authorized_keys'}",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "UseDNS no",
            "PidFile none",
            "MaxStartups 100",
        ]
        lines += ["Subsystem sftp internal-sftp"] * self.spec.has_sftp
        variables = ["TMPDIR=/tmp", *self._clock_variables()]
        lines.append(f"SetEnv {' '.join(variables)}")
        overridden = {line.split()[0] for line in self.spec.sshd}
        return [line for line in lines if line.split()[0] not in overridden]


@contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue


def _kept_paths() -> list[str]:
    """Return the directories that a node's Python needs below mount points that get covered."""
    needed = {Path(path) for path in (sys.prefix, sys.base_prefix, str(REPOSITORY))}
    needed |= {path.resolve() for path in needed}
    return sorted(str(path) for path in needed if any(path.is_relative_to(place) for place in COVERED))
