"""Which machines will connect with each other, and what their knocking at each other tells; pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from csdctl.fleet.checks import Check, Status

MAX_OTHER_PAIRS = 64
"""Up to so many machines, pairs that need not talk are tried too."""

REMEDIES = {
    "timed out": "let TCP ports 1024 and up through the firewall between these machines",
    "connection refused": "let TCP ports 1024 and up through the firewall between these machines",
}
LOOK = "look at routes and addresses; name the shared network as `network:` in the fleet file"


@dataclass(frozen=True)
class ConnectAttempt:
    """One machine knocked at a door of another; `why_not` is '' when it was let in."""

    visitor: str
    owner: str
    address: str
    port: int
    why_not: str = ""


def must_connect(one: int, other: int, num_ranks: int) -> bool:
    """Whether two ranks connect in training: rank 0 with all, others at a distance of a power of two.

    The sum is a star around rank 0. What is gathered goes by Open MPI's dissemination, recursive doubling,
    ring and Bruck, whose partners are 1, 2, 4, … ranks apart, counted around the end.
    """
    distance = abs(one - other)
    around = num_ranks - distance
    return not (one and other) or distance & (distance - 1) == 0 or around & (around - 1) == 0


def pairs_to_try(machines: Sequence[str]) -> dict[str, list[str]]:
    """At whose doors each machine knocks; `machines` in order of rank, the host first."""
    count = len(machines)
    return {
        visitor: [
            owner
            for number, owner in enumerate(machines)
            if number != me and (count <= MAX_OTHER_PAIRS or must_connect(me, number, count))
        ]
        for me, visitor in enumerate(machines)
    }


def judge_attempts(machines: Sequence[str], knocks: Iterable[ConnectAttempt]) -> list[Check]:
    """A check for every machine; who nobody reaches is red itself, rather than all who tried."""
    by_owner: dict[str, list[ConnectAttempt]] = defaultdict(list)
    for knock in knocks:
        by_owner[knock.owner].append(knock)
    ranks = {name: number for number, name in enumerate(machines)}
    blamed: dict[str, list[ConnectAttempt]] = defaultdict(list)
    for owner, tried in by_owner.items():
        refused = [knock for knock in tried if knock.why_not]
        nobody = len({knock.visitor for knock in refused}) > 1 and len(refused) == len(tried)
        for knock in refused:
            blamed[owner if nobody else knock.visitor].append(knock)
    return [_judge(name, blamed[name], ranks) for name in machines]


def _judge(name: str, refused: Sequence[ConnectAttempt], ranks: Mapping[str, int]) -> Check:
    if not refused:
        return Check(name, "ports", Status.OK, "open")
    pairs = {(knock.visitor, knock.owner) for knock in refused}
    needed = any(must_connect(ranks[one], ranks[other], len(ranks)) for one, other in pairs)
    first = refused[0]
    where = f"at {first.address} port {first.port}: {first.why_not}"
    if all(knock.owner == name for knock in refused):
        visitors = list(dict.fromkeys(knock.visitor for knock in refused))
        found = f"{_some(visitors)} cannot reach it {where}"
    else:
        owners = list(dict.fromkeys(knock.owner for knock in refused))
        found = f"cannot reach {_some(owners)} {where}"
    status = Status.FAIL if needed else Status.WARN
    return Check(name, "ports", status, found, "every machine lets in", REMEDIES.get(first.why_not, LOOK))


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
