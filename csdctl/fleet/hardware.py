"""Machines of equal hardware and software, as groups, and what tells the odd ones from the rest; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME

MEMORY_TOLERANCE = 0.03
"""Firmware takes a little more of one machine's memory than of another's."""

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
    """Machines that do not differ; the host is always alone."""

    machines: tuple[Facts, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in the order of the fleet."""
        return tuple(facts.name for facts in self.machines)

    @property
    def first(self) -> Facts:
        """One that stands for all."""
        return self.machines[0]

    def least(self, key: str) -> float | None:
        """The smallest value of `key` among them, None when nobody could tell."""
        return min((value for one in self.machines if (value := getattr(one, key)) is not None), default=None)

    def most(self, key: str) -> float | None:
        """The largest value of `key` among them."""
        return max((value for one in self.machines if (value := getattr(one, key)) is not None), default=None)


def group_machines(machines: Iterable[Facts]) -> list[EqualMachines]:
    """The machines that answered, those of equal hardware and software together, in their order."""
    answered = [facts for facts in machines if not facts.problem]
    groups: dict[tuple[object, ...], list[list[Facts]]] = {}
    for facts in sorted(answered, key=_memory_bytes):
        clusters = groups.setdefault(_kind(facts), [])
        if clusters and _memory_bytes(facts) <= _memory_bytes(clusters[-1][0]) * (1 + MEMORY_TOLERANCE):
            clusters[-1].append(facts)
        else:
            clusters.append([facts])
    order = {facts.name: number for number, facts in enumerate(answered)}
    found = [sorted(each, key=lambda facts: order[facts.name]) for many in groups.values() for each in many]
    return [EqualMachines(tuple(each)) for each in sorted(found, key=lambda each: order[each[0].name])]


def find_differences(groups: Sequence[EqualMachines]) -> list[tuple[EqualMachines, str]]:
    """What nodes have otherwise than most: one text for each group but the largest.

    Empty when no group has more than half of the nodes: then there is no rule to differ from.
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
        sizes = [f"{_memory_bytes(one) / 2**30:.1f} GiB" for one in (odd, usual)]
        different.append(f"memory {sizes[0]} instead of {sizes[1]}")
    return ", ".join(different) or "memory a little different"


def _kind(facts: Facts) -> tuple[object, ...]:
    return (facts.name == HOST_NAME, *(getattr(facts, key) for key in _KEYS))


def _memory_bytes(facts: Facts) -> int:
    return facts.memory_limit_bytes or facts.memory_bytes or 0
