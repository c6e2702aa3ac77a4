"""The lab as a whole: a host, three nodes, and a gate with two more nodes behind it.

    host ──┬── csd0, csd1, csd2          10.77.0.0/24, fd77:0:0:1::/64
           └── gate ──┬── far0, far1      10.77.1.0/24, fd77:0:0:2::/64
                      (the host has no way there but through the gate's SSH server)

Everything carries the lab's name: namespaces, control groups, one directory. The directory is locked as long
as its process lives, so that the next lab can tell what a killed one has left.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.emulation.cgroups import list_cgroups, remove_cgroup
from tests.lab import network
from tests.lab.host import LabHost
from tests.lab.machines import INTERFACE, LabNode, Wanted
from tests.lab.network import Segment, run_command, run_ip

PREFIX = "csdlab-"
PLACE = Path("/var/tmp")  # nodes have a /tmp and a /run of their own
GATE_NUMBER = 5
NUM_NODES = 3
NUM_FAR = 2


@dataclass
class Lab:
    """Machines that are up, and the means to add one."""

    name: str
    directory: Path
    host: LabHost
    front: Segment
    back: Segment
    nodes: dict[str, LabNode] = field(default_factory=dict)

    @property
    def key(self) -> Path:
        """The private key that every node lets in."""
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

    def add(self, wanted: Wanted, segment: Segment) -> LabNode:
        """A new node at the end of a cable; it is switched on, and not waited for."""
        node = LabNode(wanted, self.name, self.directory, self.key)
        self.nodes[node.name] = node
        addresses = (wanted.address, *wanted.other_addresses)
        network.lay_cable(node.namespace, INTERFACE, segment, f"p-{node.name}", addresses)
        node.power_on()
        return node

    @contextmanager
    def node(self, name: str, number: int, *, is_ipv6: bool = False, **wishes: object) -> Iterator[LabNode]:
        """One more node beside the standing ones, for as long as the block lasts."""
        address = self.front.ipv6(number) if is_ipv6 else self.front.ipv4(number)
        node = self.add(Wanted(name, address, **wishes), self.front)  # type: ignore[arg-type]
        try:
            node.wait_until_up()
            yield node
        finally:
            del self.nodes[name]
            node.remove()
            # Another node may get the address, with another hardware address.
            run_ip(self.host.namespace, f"neigh flush dev {self.front.bridge}")

    @contextmanager
    def routed_but_for_ssh(self) -> Iterator[None]:
        """The gate passes packets on, so that MPI reaches the nodes behind it; SSH must still jump."""
        gate = f"--net={network.NAMESPACES / self.gate.namespace}"
        rules = (
            "table inet lab { chain forward { type filter hook forward priority 0; tcp dport 22 drop\n}\n}\n"
        )
        run_command("nsenter", gate, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        run_command("nsenter", gate, "nft", "-f", "-", input_text=rules)
        run_ip(self.host.namespace, f"route add {self.back.ipv4(0)}/24 via {self.front.ipv4(GATE_NUMBER)}")
        for node in self.far:
            run_ip(node.namespace, f"route add {self.front.ipv4(0)}/24 via {self.back.ipv4(GATE_NUMBER)}")
        try:
            yield
        finally:
            for node in self.far:
                run_ip(node.namespace, f"route del {self.front.ipv4(0)}/24")
            run_ip(self.host.namespace, f"route del {self.back.ipv4(0)}/24")
            run_command("nsenter", gate, "nft", "-f", "-", input_text="delete table inet lab\n")
            run_command("nsenter", gate, "sysctl", "-qw", "net.ipv4.ip_forward=0")


@contextmanager
def open_lab() -> Iterator[Lab]:
    """A lab that is up; at the end nothing of it is left. Begins with what killed ones left."""
    sweep()
    with ExitStack() as stack:
        directory = _make_directory(stack)
        name = directory.name
        stack.callback(remove_leavings, name)
        host = LabHost(name, directory)
        run_command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(directory / "id"))
        yield _start(name, directory, host)


def sweep() -> list[str]:
    """Remove what labs have left whose process is gone; returns their names."""
    removed = []
    for directory in PLACE.glob(f"{PREFIX}*"):
        with ExitStack() as stack:
            if _lock(stack, directory):
                remove_leavings(directory.name)
                removed.append(directory.name)
    return removed


def remove_leavings(name: str) -> None:
    """End and remove all that carries the lab's name."""
    for namespace in network.list_namespaces(f"{name}-"):
        network.remove_namespace(namespace)
    for group in list_cgroups(f"{name}-"):
        remove_cgroup(group)
    shutil.rmtree(PLACE / name, ignore_errors=True)


def _start(name: str, directory: Path, host: LabHost) -> Lab:
    back_namespace = f"{name}-back"
    network.make_namespace(back_namespace)
    front = Segment(host.namespace, "front", "10.77.0", "fd77:0:0:1")
    back = Segment(back_namespace, "back", "10.77.1", "fd77:0:0:2")
    for segment in (front, back):
        network.make_bridge(segment)
    network.give_addresses(host.namespace, front.bridge, [front.ipv4(1), front.ipv6(1)])
    lab = Lab(name, directory, host, front, back)
    for number in range(NUM_NODES):
        wanted = Wanted(f"csd{number}", front.ipv4(10 + number), (front.ipv6(10 + number),))
        lab.add(wanted, front)
    gate = lab.add(Wanted("gate", front.ipv4(GATE_NUMBER), (front.ipv6(GATE_NUMBER),)), front)
    inner = (back.ipv4(GATE_NUMBER), back.ipv6(GATE_NUMBER))
    network.lay_cable(gate.namespace, "inner", back, "p-gate", inner)
    for number in range(NUM_FAR):
        wanted = Wanted(f"far{number}", back.ipv4(10 + number), (back.ipv6(10 + number),))
        lab.add(wanted, back)
    for node in lab.nodes.values():
        node.wait_until_up()
    return lab


def _make_directory(stack: ExitStack) -> Path:
    """A new directory, locked before it has the name that others look for."""
    new = Path(tempfile.mkdtemp(prefix="new-csdlab-", dir=PLACE))
    assert _lock(stack, new)
    directory = PLACE / f"{PREFIX}{new.name[-6:].replace('_', '0')}"
    new.rename(directory)
    directory.chmod(0o755)
    return directory


def _lock(stack: ExitStack, directory: Path) -> bool:
    """Hold the directory's lock until `stack` ends; False when somebody else does."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return False
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
