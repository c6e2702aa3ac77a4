"""Machines with equal hardware and software: groups, outliers, and classes that share measurements. Pure.

Nodes that are drives are matched to drives of the host by the serial number that both report.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from csdctl.fleet.facts import Drive, Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import names_by_value
from csdctl.worker.protocol.run_spec import AUTO, CPU

_KEYS: Mapping[str, str] = {
    "architecture": "architecture",
    "cpu_model": "CPU",
    "num_cores": "cores",
    "cpu_limit": "CPU limit",
    "accelerator": "GPU",
    "python_version": "Python",
    "tensorflow_version": "TensorFlow",
    "mpi_version": "MPI",
    "mpi4py_version": "mpi4py",
    "glibc_version": "glibc",
}
_UNKNOWN = "?"


EqualMachines = tuple[Facts, ...]
"""Machines with equal hardware and software, in the order of the fleet. The host is never among others."""


def group_machines(machines: Iterable[Facts]) -> list[EqualMachines]:
    """Group the machines without a problem by equal hardware and software, in their order."""
    groups: dict[tuple[object, ...], list[Facts]] = defaultdict(list)
    for facts in machines:
        if not facts.problem:
            groups[facts.name == HOST_NAME, *_describe(facts).values()].append(facts)
    return [tuple(group) for group in groups.values()]


def find_differences(groups: Sequence[EqualMachines]) -> dict[EqualMachines, str]:
    """Describe how each group differs from the one with more than half of the nodes, if there is one."""
    nodes = [group for group in groups if group[0].name != HOST_NAME]
    most = max(nodes, key=len, default=())
    if 2 * len(most) <= sum(map(len, nodes)):
        return {}
    usual = _describe(most[0])
    differences = {}
    for group in nodes:
        changes = {name: value for name, value in _describe(group[0]).items() if value != usual[name]}
        if group is not most:
            described = (f"{name} {value} instead of {usual[name]}" for name, value in changes.items())
            differences[group] = ", ".join(described)
    return differences


def _describe(facts: Facts) -> dict[str, str]:
    """Return what equal machines have in common. They report slightly different amounts of memory."""
    size = facts.memory_limit_bytes or facts.memory_bytes
    memory = f"{round_memory_up(size) / 2**30:g} GiB" if size else None
    values = {name: getattr(facts, key) for key, name in _KEYS.items()} | {"memory": memory}
    return {name: str(value or "missing") for name, value in values.items()}


def match_drives(facts: Mapping[str, Facts]) -> dict[str, Drive]:
    """Return the host's drive of each node that is a drive: only host and node have its serial number."""
    of_host = {
        (drive.serial, drive.model): drive
        for drive in reversed(facts[HOST_NAME].drives)
        if len(set(drive.serial.strip())) > 1  # placeholders are blanks or one repeated character
    }
    serials = [serial for serial, _ in of_host]
    common = {
        name: of_host.keys() & {(drive.serial, drive.model) for drive in machine.drives}
        for name, machine in facts.items()
        if name != HOST_NAME
    }
    nodes = names_by_value((name, identity) for name, identities in common.items() for identity in identities)
    return {
        name: of_host[identity]
        for name, identities in common.items()
        for identity in identities
        if len(identities) == len(nodes[identity]) == serials.count(identity[0]) == 1
    }


@dataclass(frozen=True)
class MachineClass:
    """Machines with equal step times. None, '' and 0 mean unknown."""

    architecture: str
    cpu_model: str
    cpu_features: str
    """A short hash of the instruction sets of the CPU."""
    num_cores: int
    cpu_limit: float | None
    memory_bytes: int
    """Memory available to a rank at most, rounded up to 1, 1.25, 1.5 or 1.75 times a power of two."""
    python: str
    """Major and minor version: a patch release does not change the step time."""
    tensorflow: str
    keras: str
    numpy: str
    num_emulated: int = 0
    """Number of nodes of an emulated fleet, which share the cores of one machine; 0: a real machine."""
    is_host: bool = False
    """The host also sums vectors and serves the nodes, unlike a node with equal hardware."""
    accelerator: str = ""

    @property
    def key(self) -> str:
        """A key that is equal for machines of one class, on any host and in any version with these fields."""
        return _short_hash(asdict(self))

    @property
    def name(self) -> str:
        """A name for display: "aarch64 Cortex-A53, 4 cores, 6 GiB". Not unique."""
        cores = f"{self.num_cores or _UNKNOWN} core" + ("" if self.num_cores == 1 else "s")
        cpu = re.sub(r"\((?:R|TM|C)\)|\bCPU\b", " ", self.cpu_model, flags=re.IGNORECASE)
        parts = [" ".join([self.architecture or _UNKNOWN, *cpu.split()]), cores]
        if self.cpu_limit is not None:
            parts.append(f"{self.cpu_limit:g} CPU")
        if self.memory_bytes:
            parts.append(f"{self.memory_bytes / 2**30:.3g} GiB")
        if self.accelerator:
            parts.append(self.accelerator)
        if self.num_emulated:
            parts.append(f"emulated with {self.num_emulated} node" + ("" if self.num_emulated == 1 else "s"))
        return ", ".join(parts)


@dataclass(frozen=True)
class FleetClass:
    """Fleets whose sums take as long, apart from the number of ranks: same machines and network."""

    host: MachineClass
    nodes: tuple[MachineClass, ...]
    """Each class once, in the order of their keys."""
    network: str

    @property
    def key(self) -> str:
        """A key that is equal for fleets of one class, regardless of their number of nodes."""
        return _short_hash([self.host.key, [node.key for node in self.nodes], self.network])


def classify_machine(facts: Facts, *, num_emulated: int = 0, is_host: bool = False) -> MachineClass:
    """Return the class of a machine. `num_emulated` is the number of nodes of an emulated fleet."""
    sizes = [size for size in (facts.memory_bytes, facts.memory_limit_bytes) if size]
    features = " ".join(sorted(set(facts.cpu_features)))
    return MachineClass(
        architecture=facts.architecture or "",
        cpu_model=facts.cpu_model or "",
        cpu_features=hashlib.sha256(features.encode()).hexdigest()[:8] if features else "",
        num_cores=facts.num_cores or 0,
        cpu_limit=None if facts.cpu_limit is None else round(facts.cpu_limit, 3),
        memory_bytes=round_memory_up(min(sizes)) if sizes else 0,
        python=".".join((facts.python_version or "").split(".")[:2]),
        tensorflow=facts.tensorflow_version or "",
        keras=facts.keras_version or "",
        numpy=facts.numpy_version or "",
        num_emulated=num_emulated,
        is_host=is_host,
        accelerator=facts.accelerator or "",
    )


def choose_device(fleet: Fleet, facts: Facts) -> str:
    """Return the `device` of a machine's rank. `auto` is the CPU unless TensorFlow may see a GPU there."""
    device = fleet.device_of(facts.name)
    has_gpu = facts.accelerator and facts.has_cuda is not False
    return device if has_gpu or device != AUTO else CPU


def classify_fleet(host: MachineClass, nodes: Iterable[MachineClass], network: str) -> FleetClass:
    """Return the class of a fleet. Order and number of the nodes do not matter."""
    return FleetClass(host, tuple(sorted(set(nodes), key=lambda node: node.key)), network)


def round_memory_up(num_bytes: int) -> int:
    """Round up to 1, 1.25, 1.5 or 1.75 times a power of two: 5.8 and 5.7 GiB both become 6.

    Up, because firmware and kernel reserve part of the nominal memory: reported sizes are a few percent below
    such a number, so equal machines are never on different sides of it.
    """
    quarter: int = 2 ** max(0, math.floor(math.log2(num_bytes)) - 2)
    return math.ceil(num_bytes / quarter) * quarter


def _short_hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
