"""Machine classes: machines with equal hardware, limits and software, which share measurements; pure.

A measurement of one machine is valid for its whole class, and stays valid. A class therefore excludes
properties that change over time (available memory, free disk, clock) and those that differ between equal
machines (names, a few megabytes reserved by firmware).
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from csdctl.fleet.facts import Facts

KEY_LENGTH = 12
_UNKNOWN = "?"


@dataclass(frozen=True)
class MachineClass:
    """Machines with equal step times. None, '' and 0 mean unknown."""

    architecture: str
    cpu_model: str
    cpu_features: str
    """A short hash of the instruction sets of the CPU."""
    num_cores: int
    cpu_limit: float | None
    """CPU limit in cores; None: unlimited."""
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

    @property
    def key(self) -> str:
        """A key that is equal for machines of one class, on any host and in any version with these fields."""
        return _short_hash(
            {name: value for name, value in asdict(self).items() if name != "is_host" or value}
        )

    @property
    def name(self) -> str:
        """A name for display: "aarch64 Cortex-A53, 4 cores, 6 GiB"; not unique."""
        cores = f"{self.num_cores or _UNKNOWN} core" + ("" if self.num_cores == 1 else "s")
        parts = [f"{self.architecture or _UNKNOWN} {_shorten(self.cpu_model)}".rstrip(), cores]
        if self.cpu_limit is not None:
            parts.append(f"{self.cpu_limit:g} CPU")
        if self.memory_bytes:
            parts.append(f"{self.memory_bytes / 2**30:.3g} GiB")
        if self.num_emulated:
            parts.append(f"emulated with {self.num_emulated} node" + ("" if self.num_emulated == 1 else "s"))
        return ", ".join(parts)

    @property
    def software(self) -> str:
        """The versions for display: "Python 3.11, TensorFlow 2.21.0, …"."""
        versions = {
            "Python": self.python,
            "TensorFlow": self.tensorflow,
            "Keras": self.keras,
            "NumPy": self.numpy,
        }
        return ", ".join(f"{name} {version or _UNKNOWN}" for name, version in versions.items())

    @property
    def is_emulated(self) -> bool:
        """Whether it belongs to an emulated fleet."""
        return self.num_emulated > 0


@dataclass(frozen=True)
class FleetClass:
    """Fleets with equal collective times, apart from the number of ranks: same machines and network."""

    host: MachineClass
    nodes: tuple[MachineClass, ...]
    """Each class once, in the order of their keys."""
    network: str
    """As in fleet.yaml: a CIDR, or '' if MPI chooses."""

    @property
    def key(self) -> str:
        """A key that is equal for fleets of one class, regardless of their number of nodes."""
        return _short_hash([self.host.key, [node.key for node in self.nodes], self.network])

    @property
    def is_emulated(self) -> bool:
        """Whether it belongs to an emulated fleet."""
        return self.host.is_emulated


def classify_machine(facts: Facts, *, num_emulated: int = 0, is_host: bool = False) -> MachineClass:
    """Return the class of a machine; `num_emulated` is the number of nodes of an emulated fleet."""
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
    )


def classify_fleet(host: MachineClass, nodes: Iterable[MachineClass], network: str) -> FleetClass:
    """Return the class of a fleet; order and number of the nodes do not matter."""
    return FleetClass(host, tuple(sorted(set(nodes), key=lambda node: node.key)), network)


def round_memory_up(num_bytes: int) -> int:
    """Round up to 1, 1.25, 1.5 or 1.75 times a power of two: 5.8 and 5.7 GiB both become 6.

    Up, because firmware and kernel reserve part of the nominal memory: reported sizes are a few percent below
    such a number, so equal machines are never on different sides of it.
    """
    quarter: int = 2 ** max(0, math.floor(math.log2(num_bytes)) - 2)
    return math.ceil(num_bytes / quarter) * quarter


def _shorten(cpu_model: str) -> str:
    """Remove trademark signs and the word CPU."""
    return " ".join(re.sub(r"\((?:R|TM|C)\)|\bCPU\b", " ", cpu_model, flags=re.IGNORECASE).split())


def _short_hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]
