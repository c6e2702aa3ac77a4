"""Which pairs of machines must connect, and how to judge their connection attempts; pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from csdctl.fleet.checks import Check, Status

MAX_OTHER_PAIRS = 64
"""With at most this number of machines, pairs that do not connect in training are also tried."""

REMEDIES = {
    "timed out": "let TCP ports 1024 and up through the firewall between these machines",
    "connection refused": "let TCP ports 1024 and up through the firewall between these machines",
}
DEFAULT_REMEDY = "check routes and addresses; name the shared network as `network:` in the fleet file"


@dataclass(frozen=True)
class ConnectAttempt:
    """An attempt of `client` to connect to a listener of `server`; `reason` is '' when it succeeded."""

    client: str
    server: str
    address: str
    port: int
    reason: str = ""


def must_connect(first: int, second: int, num_ranks: int) -> bool:
    """Return whether two ranks connect in training.

    Rank 0 connects with all ranks, other ranks at a distance of a power of two. The sum is a star around
    rank 0. Gathering uses Open MPI's dissemination, recursive doubling, ring and Bruck algorithms, in which
    partners are 1, 2, 4, … ranks apart, modulo the number of ranks.
    """
    distance = abs(first - second)
    around = num_ranks - distance
    return not (first and second) or distance & (distance - 1) == 0 or around & (around - 1) == 0


def pairs_to_try(machines: Sequence[str]) -> dict[str, list[str]]:
    """Return the servers that each machine connects to; `machines` are in rank order, the host first."""
    count = len(machines)
    return {
        client: [
            server
            for other, server in enumerate(machines)
            if other != rank and (count <= MAX_OTHER_PAIRS or must_connect(rank, other, count))
        ]
        for rank, client in enumerate(machines)
    }


def judge_attempts(machines: Sequence[str], attempts: Iterable[ConnectAttempt]) -> list[Check]:
    """Return a check for every machine.

    A server that no client reaches fails its own check instead of the checks of all its clients.
    """
    by_server: dict[str, list[ConnectAttempt]] = defaultdict(list)
    for attempt in attempts:
        by_server[attempt.server].append(attempt)
    ranks = {name: rank for rank, name in enumerate(machines)}
    suspects: dict[str, list[ConnectAttempt]] = defaultdict(list)
    for server, tried in by_server.items():
        refused = [attempt for attempt in tried if attempt.reason]
        is_unreachable = len({attempt.client for attempt in refused}) > 1 and len(refused) == len(tried)
        for attempt in refused:
            suspects[server if is_unreachable else attempt.client].append(attempt)
    return [_judge(name, suspects[name], ranks) for name in machines]


def _judge(name: str, refused: Sequence[ConnectAttempt], ranks: Mapping[str, int]) -> Check:
    if not refused:
        return Check(name, "ports", Status.OK, "open")
    pairs = {(attempt.client, attempt.server) for attempt in refused}
    is_needed = any(must_connect(ranks[client], ranks[server], len(ranks)) for client, server in pairs)
    first = refused[0]
    where = f"at {first.address} port {first.port}: {first.reason}"
    if all(attempt.server == name for attempt in refused):
        clients = list(dict.fromkeys(attempt.client for attempt in refused))
        found = f"{_list_names(clients)} cannot reach it {where}"
    else:
        servers = list(dict.fromkeys(attempt.server for attempt in refused))
        found = f"cannot reach {_list_names(servers)} {where}"
    status = Status.FAIL if is_needed else Status.WARN
    remedy = REMEDIES.get(first.reason, DEFAULT_REMEDY)
    return Check(name, "ports", status, found, "every machine accepts connections", remedy)


def _list_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the rest."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
