"""Which drive of the host a node is: the one whose serial both of them show; pure."""

from collections import defaultdict
from collections.abc import Mapping

from csdctl.fleet.facts import Drive, Facts
from csdctl.fleet.model import HOST_NAME


def match_drives(facts: Mapping[str, Facts]) -> dict[str, Drive]:
    """The host's drive for each node that is one, by node.

    A serial that is empty, that two nodes show, or that two drives of the host have, proves nothing.
    """
    own = {(drive.serial, drive.model): drive for drive in reversed(facts[HOST_NAME].drives)}
    shown: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, machine in facts.items():
        if name != HOST_NAME:
            for identity in {(drive.serial, drive.model) for drive in machine.drives}:
                shown[identity].append(name)
    serials = [serial for serial, _ in own]
    matches = {
        names[0]: own[identity]
        for identity, names in shown.items()
        if len(names) == 1 and identity in own and serials.count(identity[0]) == 1 and _says_much(identity[0])
    }
    return {name: matches[name] for name in facts if name in matches}


def _says_much(serial: str) -> bool:
    """Whether `serial` can tell drives apart: drives without one show blanks, or one sign repeated."""
    return len(set(serial.strip())) > 1
