"""What makes machines alike for measuring: equal hardware, equal limits, equal software; pure.

A measurement of one machine serves for all of its class, and for the same machine tomorrow. So nothing is in
it that differs from day to day (available memory, free disk, clock) or between twins (names, a few
megabytes that firmware takes).
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
    """Machines whose steps take equally long. None, '' or 0: not known."""

    architecture: str
    cpu_model: str
    cpu_features: str
    """A short hash of the instruction sets that the CPU names."""
    num_cores: int
    cpu_limit: float | None
    """Cores' worth of time that it may use; None: all."""
    memory_bytes: int
    """What a rank could fill at best, rounded up to 1, 1.25, 1.5 or 1.75 times a power of two."""
    python: str
    """Major and minor version: a patch does not change how long a step takes."""
    tensorflow: str
    keras: str
    numpy: str
    num_emulated: int = 0
    """Nodes of an emulated fleet, which share one machine's cores; 0: a machine of its own."""
    is_host: bool = False
    """The host adds up and serves the others beside its own steps, which a node that is its twin does not."""

    @property
    def key(self) -> str:
        """The same for machines of one class, on any host and in any version of csdctl with these fields."""
        return _short_hash(
            {name: value for name, value in asdict(self).items() if name != "is_host" or value}
        )

    @property
    def name(self) -> str:
        """For people: "aarch64 Cortex-A53, 4 cores, 6 GiB"; two classes may have one name."""
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
        """For people: "Python 3.11, TensorFlow 2.21.0, …"."""
        versions = {
            "Python": self.python,
            "TensorFlow": self.tensorflow,
            "Keras": self.keras,
            "NumPy": self.numpy,
        }
        return ", ".join(f"{name} {version or _UNKNOWN}" for name, version in versions.items())

    @property
    def is_emulated(self) -> bool:
        """Whether what it shows is an emulated fleet's."""
        return self.num_emulated > 0


@dataclass(frozen=True)
class FleetClass:
    """What makes sums over the ranks take equally long, but for their number: machines and network."""

    host: MachineClass
    nodes: tuple[MachineClass, ...]
    """Each class once, in the order of their keys."""
    network: str
    """As fleet.yaml has it: CIDR, or '' when MPI chooses."""

    @property
    def key(self) -> str:
        """The same for fleets of one class, however many nodes they have."""
        return _short_hash([self.host.key, [node.key for node in self.nodes], self.network])

    @property
    def is_emulated(self) -> bool:
        """Whether what it shows is an emulated fleet's."""
        return self.host.is_emulated


def classify_machine(facts: Facts, *, num_emulated: int = 0, is_host: bool = False) -> MachineClass:
    """The class of the machine that `facts` describe; in an emulated fleet with the number of its nodes."""
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
    """The class of a fleet; neither the order of the nodes nor their number matters."""
    return FleetClass(host, tuple(sorted(set(nodes), key=lambda node: node.key)), network)


def round_memory_up(num_bytes: int) -> int:
    """The next of 1, 1.25, 1.5, 1.75 times a power of two: 5.8 and 5.7 GiB are both 6.

    Up, because firmware and kernel always take some of what a machine was sold with: the sizes that are
    found lie below such a number by a few percent, where no two of one kind fall on different sides of it.
    """
    quarter: int = 2 ** max(0, math.floor(math.log2(num_bytes)) - 2)
    return math.ceil(num_bytes / quarter) * quarter


def _shorten(cpu_model: str) -> str:
    """Without what vendors decorate it with."""
    return " ".join(re.sub(r"\((?:R|TM|C)\)|\bCPU\b", " ", cpu_model, flags=re.IGNORECASE).split())


def _short_hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]
