"""Which drive of the host a node is: the one whose serial both of them show; pure."""

from collections import defaultdict
from collections.abc import Mapping

from csdctl.fleet.facts import Drive, Facts
from csdctl.fleet.model import HOST_NAME


def match_drives(facts: Mapping[str, Facts]) -> dict[str, Drive]:
    """The host's drive for each node that is one, by node.

    A serial that is empty, that two nodes show, or that two drives of the host have, proves nothing; nor
    does a node that shows several of the host's drives: it sees the host's own devices.
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
    """Serial and model of the host's drives that `machine` shows too."""
    identities = {(drive.serial, drive.model) for drive in machine.drives}
    return {identity for identity in identities & own.keys() if _says_much(identity[0])}


def _says_much(serial: str) -> bool:
    """Whether `serial` can tell drives apart: drives without one show blanks, or one sign repeated."""
    return len(set(serial.strip())) > 1
