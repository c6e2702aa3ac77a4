"""Group machines by equal hardware and software, and describe outliers; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME

MEMORY_TOLERANCE = 0.03
"""Firmware reserves slightly different amounts of memory on equal machines."""

_KEYS: Mapping[str, str] = {
    "architecture": "architecture",
    "cpu_model": "CPU",
    "num_cores": "cores",
    "cpu_limit": "CPU limit",
    "python_version": "Python",
    "tensorflow_version": "TensorFlow",
    "mpi_version": "MPI",
    "mpi4py_version": "mpi4py",
    "glibc_version": "glibc",
}


@dataclass(frozen=True)
class EqualMachines:
    """Machines with equal hardware and software; the host is always alone."""

    machines: tuple[Facts, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The machines' names, in the order of the fleet."""
        return tuple(facts.name for facts in self.machines)

    @property
    def first(self) -> Facts:
        """A representative machine."""
        return self.machines[0]

    def least(self, key: str) -> float | None:
        """Return the smallest value of `key`, None if all are unknown."""
        return min(
            (value for machine in self.machines if (value := getattr(machine, key)) is not None), default=None
        )

    def most(self, key: str) -> float | None:
        """Return the largest value of `key`, None if all are unknown."""
        return max(
            (value for machine in self.machines if (value := getattr(machine, key)) is not None), default=None
        )


def group_machines(machines: Iterable[Facts]) -> list[EqualMachines]:
    """Group the machines without a problem by equal hardware and software, in their order."""
    reachable = [facts for facts in machines if not facts.problem]
    groups: dict[tuple[object, ...], list[list[Facts]]] = {}
    for facts in sorted(reachable, key=_memory_bytes):
        clusters = groups.setdefault(_identity(facts), [])
        if clusters and _memory_bytes(facts) <= _memory_bytes(clusters[-1][0]) * (1 + MEMORY_TOLERANCE):
            clusters[-1].append(facts)
        else:
            clusters.append([facts])
    order = {facts.name: number for number, facts in enumerate(reachable)}
    equal = [
        sorted(cluster, key=lambda facts: order[facts.name])
        for clusters in groups.values()
        for cluster in clusters
    ]
    return [
        EqualMachines(tuple(cluster)) for cluster in sorted(equal, key=lambda cluster: order[cluster[0].name])
    ]


def find_differences(groups: Sequence[EqualMachines]) -> list[tuple[EqualMachines, str]]:
    """Describe how nodes differ from the majority: a text for each group except the largest.

    Return an empty list when no group has more than half of the nodes.
    """
    nodes = [group for group in groups if HOST_NAME not in group.names]
    usual = max(nodes, key=lambda group: len(group.names), default=None)
    if usual is None or 2 * len(usual.names) <= sum(len(group.names) for group in nodes):
        return []
    return [(group, _compare(group.first, usual.first)) for group in nodes if group is not usual]


def _compare(odd: Facts, usual: Facts) -> str:
    different = [
        f"{label} {getattr(odd, key) or 'missing'} instead of {getattr(usual, key) or 'missing'}"
        for key, label in _KEYS.items()
        if getattr(odd, key) != getattr(usual, key)
    ]
    low, high = sorted((_memory_bytes(odd), _memory_bytes(usual)))
    if high > low * (1 + MEMORY_TOLERANCE):
        sizes = [f"{_memory_bytes(facts) / 2**30:.1f} GiB" for facts in (odd, usual)]
        different.append(f"memory {sizes[0]} instead of {sizes[1]}")
    return ", ".join(different) or "memory slightly different"


def _identity(facts: Facts) -> tuple[object, ...]:
    return (facts.name == HOST_NAME, *(getattr(facts, key) for key in _KEYS))


def _memory_bytes(facts: Facts) -> int:
    return facts.memory_limit_bytes or facts.memory_bytes or 0
