"""Group errors of many nodes by cause; pure."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet
from csdctl.fleet.ranges import show_names

_ADDRESS = "\0"


@dataclass(frozen=True)
class Problem:
    """A problem that occurred on all machines in `names`."""

    names: tuple[str, ...]
    message: str
    remedy: str


def fold_problems(failed: Mapping[str, CsdctlError], fleet: Fleet) -> list[Problem]:
    """Group the errors of `failed`; messages that differ only in the node's address are one problem."""
    addresses = {node.name: node.address for node in fleet.nodes}
    grouped: dict[tuple[type, str], list[str]] = defaultdict(list)
    for name, error in failed.items():
        address = addresses.get(name)
        template = error.message.replace(address, _ADDRESS) if address else error.message
        grouped[type(error), template].append(name)
    return [_problem(template, names, failed, addresses) for (_, template), names in grouped.items()]


def _problem(
    template: str, names: list[str], failed: Mapping[str, CsdctlError], addresses: Mapping[str, str]
) -> Problem:
    first = failed[names[0]]
    remedies = {failed[name].remedy for name in names}
    remedy = first.remedy if len(remedies) == 1 else f"{first.remedy} (shown for {names[0]})"
    shown = show_names(addresses.get(name, "") for name in names)
    return Problem(tuple(names), template.replace(_ADDRESS, shown), remedy)
