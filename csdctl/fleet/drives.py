"""Match nodes to drives of the host by the serial number that both report; pure."""

from collections import defaultdict
from collections.abc import Mapping

from csdctl.fleet.facts import Drive, Facts
from csdctl.fleet.model import HOST_NAME


def match_drives(facts: Mapping[str, Facts]) -> dict[str, Drive]:
    """Return the host's drive of each node that is a drive, by node.

    A serial number that is empty, reported by two nodes, or shared by two drives of the host is ignored. So
    is a node that reports several of the host's drives: it sees the host's own devices.
    """
    own = {(drive.serial, drive.model): drive for drive in reversed(facts[HOST_NAME].drives)}
    shown: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, machine in facts.items():
        if name != HOST_NAME:
            for identity in _common(machine, own):
                shown[identity].append(name)
    serials = [serial for serial, _ in own]
    matches = {
        names[0]: own[identity]
        for identity, names in shown.items()
        if len(names) == 1 and serials.count(identity[0]) == 1 and len(_common(facts[names[0]], own)) == 1
    }
    return {name: matches[name] for name in facts if name in matches}


def _common(machine: Facts, own: Mapping[tuple[str, str], Drive]) -> set[tuple[str, str]]:
    """Return serial number and model of those drives of the host that `machine` also reports."""
    identities = {(drive.serial, drive.model) for drive in machine.drives}
    return {identity for identity in identities & own.keys() if _is_distinctive(identity[0])}


def _is_distinctive(serial: str) -> bool:
    """Return whether `serial` is usable; placeholders are blanks or one repeated character."""
    return len(set(serial.strip())) > 1
