"""The lab: a host, three nodes, and a jump host (gate) with two more nodes behind it.

    host ──┬── csd0, csd1, csd2          10.77.0.0/24, fd77:0:0:1::/64
           └── gate ──┬── far0, far1      10.77.1.0/24, fd77:0:0:2::/64
                      (the host reaches them only through the gate's SSH server)

Namespaces, control groups and the directory have the lab's name. The directory is locked while its process
lives, so that the next lab recognizes the remains of a killed lab.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.emulation.limits import list_cgroups, remove_cgroup
from tests.lab import network
from tests.lab.machines import INTERFACE, LabNode, NodeSpec
from tests.lab.network import DIES_WITH_PARENT, Segment, run_command
from tests.patience import communicate
from tests.session import lock

PREFIX = "csdlab-"
PLACE = Path("/var/tmp")  # nodes have their own /tmp and /run
GATE_NUMBER = 5
NUM_NODES = 3
NUM_FAR = 2


class LabHost:
    """The machine that csdctl runs on: shares the file system, with its own network and hostname."""

    name = "labhost"

    def __init__(self, lab: str, directory: Path) -> None:
        self.namespace = f"{lab}-host"
        self.directory = directory / "host"
        for part in ("home/.ssh", "tmp"):
            (self.directory / part).mkdir(parents=True)
        network.make_namespace(self.namespace)

    def start(
        self, *command: str, cwd: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `command` there as a process group leader, which receives the signals."""
        return subprocess.Popen(
            self._build_command(command),
            cwd=cwd,
            env=self.environment() | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(
        self, *command: str, cwd: Path, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` there to completion; raises StalledError."""
        process = self.start(*command, cwd=cwd, environment=environment)
        stdout, stderr = communicate(process, cwd)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def _build_command(self, command: Sequence[str]) -> list[str]:
        return [
            *DIES_WITH_PARENT,
            *("nsenter", f"--net={network.NAMESPACES / self.namespace}"),
            *("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command),
        ]

    def environment(self) -> dict[str, str]:
        """Return the variables of commands there."""
        dropped = ("CSDCTL_", "SSH_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        home, temporary = self.directory / "home", self.directory / "tmp"
        return inherited | {"HOME": str(home), "TMPDIR": str(temporary), "NO_COLOR": "1", "COLUMNS": "200"}


@dataclass
class Lab:
    """The running machines; more can be added."""

    name: str
    directory: Path
    host: LabHost
    front: Segment
    back: Segment
    nodes: dict[str, LabNode] = field(default_factory=dict)

    @property
    def key(self) -> Path:
        """The private key that every node accepts."""
        return self.directory / "id"

    @property
    def near(self) -> tuple[LabNode, ...]:
        return tuple(self.nodes[f"csd{number}"] for number in range(NUM_NODES))

    @property
    def far(self) -> tuple[LabNode, ...]:
        return tuple(self.nodes[f"far{number}"] for number in range(NUM_FAR))

    @property
    def gate(self) -> LabNode:
        return self.nodes["gate"]

    def add(self, spec: NodeSpec, segment: Segment) -> LabNode:
        """Add and start a node, without waiting until it is up."""
        node = LabNode(spec, self.name, self.directory, self.key)
        self.nodes[node.name] = node
        addresses = (spec.address, *spec.other_addresses)
        network.connect_cable(node.namespace, INTERFACE, segment, f"p-{node.name}", addresses)
        node.power_on()
        return node

    @contextmanager
    def node(self, name: str, number: int, *, is_ipv6: bool = False, **wishes: object) -> Iterator[LabNode]:
        """Add a node for the duration of the block."""
        address = self.front.ipv6(number) if is_ipv6 else self.front.ipv4(number)
        node = self.add(NodeSpec(name, address, **wishes), self.front)  # type: ignore[arg-type]
        try:
            node.wait_until_up()
            yield node
        finally:
            del self.nodes[name]
            node.remove()
            network.forget_neighbours(self.front)


@contextmanager
def open_lab(front: str = "10.77.0", first_number: int = 10) -> Iterator[Lab]:
    """Yield a running lab and remove it at the end; first remove killed labs.

    `front` begins the addresses of the host and its nodes; that of csd0 ends with `first_number`.
    """
    remove_stale_labs()
    with ExitStack() as stack:
        directory = _make_directory(stack)
        name = directory.name
        stack.callback(remove_lab, name)
        host = LabHost(name, directory)
        run_command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(directory / "id"))
        yield _start(name, directory, host, front, first_number)


def remove_stale_labs() -> list[str]:
    """Remove labs without a running process; return their names."""
    removed = []
    for directory in PLACE.glob(f"{PREFIX}*"):
        with ExitStack() as stack:
            if _lock(stack, directory):
                remove_lab(directory.name)
                removed.append(directory.name)
    return removed


def remove_lab(name: str) -> None:
    """End and remove everything with the lab's name."""
    for namespace in network.list_namespaces(f"{name}-"):
        network.remove_namespace(namespace)
    for group in list_cgroups(f"{name}-"):
        remove_cgroup(group)
    shutil.rmtree(PLACE / name, ignore_errors=True)


def _start(name: str, directory: Path, host: LabHost, prefix: str, first_number: int) -> Lab:
    back_namespace = f"{name}-back"
    network.make_namespace(back_namespace)
    front = Segment(host.namespace, "front", prefix, "fd77:0:0:1")
    back = Segment(back_namespace, "back", "10.77.1", "fd77:0:0:2")
    for segment in (front, back):
        network.make_bridge(segment)
    network.give_addresses(host.namespace, front.bridge, [front.ipv4(1), front.ipv6(1)])
    lab = Lab(name, directory, host, front, back)
    for number in range(NUM_NODES):
        place = first_number + number
        spec = NodeSpec(f"csd{number}", front.ipv4(place), (front.ipv6(place),))
        lab.add(spec, front)
    gate = lab.add(NodeSpec("gate", front.ipv4(GATE_NUMBER), (front.ipv6(GATE_NUMBER),)), front)
    inner = (back.ipv4(GATE_NUMBER), back.ipv6(GATE_NUMBER))
    network.connect_cable(gate.namespace, "inner", back, "p-gate", inner)
    for number in range(NUM_FAR):
        spec = NodeSpec(f"far{number}", back.ipv4(10 + number), (back.ipv6(10 + number),))
        lab.add(spec, back)
    for node in lab.nodes.values():
        node.wait_until_up()
    return lab


def _make_directory(stack: ExitStack) -> Path:
    """Create a directory, locked before it gets the name that other labs look for."""
    new = Path(tempfile.mkdtemp(prefix="new-csdlab-", dir=PLACE))
    assert _lock(stack, new)
    directory = PLACE / f"{PREFIX}{new.name[-6:].replace('_', '0')}"
    new.rename(directory)
    directory.chmod(0o755)
    return directory


def _lock(stack: ExitStack, directory: Path) -> bool:
    """Lock the directory until `stack` ends; return False if another process holds the lock."""
    descriptor = None
    with suppress(FileNotFoundError):
        descriptor = lock(directory)
    if descriptor is not None:
        stack.callback(os.close, descriptor)
    return descriptor is not None
