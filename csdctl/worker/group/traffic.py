"""What the ranks of a group have sent to each other, as their kernels count it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from csdctl.worker.group.values import Check, as_count
from csdctl.worker.protocol.events import SUMS, TRAFFIC_NAMES, SentBytes
from csdctl.worker.protocol.tcp_counters import list_connections

ConnectionRow = tuple[str, str, int, int]
"""Local and peer endpoint, bytes sent and received."""
Message = tuple[str, int, int, int]
"""Traffic class, sender, receiver and bytes."""
Counters = tuple[list[Message], list[ConnectionRow]]
"""Of one rank: the messages that it sent or received, and its connections."""
DRAIN_S = 1.0
"""How long bytes may be on their way: a peer that is gone acknowledges nothing."""
_LARGEST_RANK, _LARGEST_COUNT = 1 << 16, 1 << 50
_MAX_ENDPOINT = 80
"""Characters of an IPv6 address with its zone, and a port."""


def list_connection_rows() -> list[ConnectionRow]:
    """Return the TCP connections of this process, when what it has sent has arrived."""
    rows = list_connections(drain_s=DRAIN_S)
    return [(one.local, one.peer, one.num_sent, one.num_received) for one in rows]


def gather_traffic(
    allgather: Callable[[Any, Check[Counters]], Sequence[Counters]],
    messages: Sequence[Message],
    connections: Sequence[ConnectionRow],
) -> list[SentBytes]:
    """Return the bytes sent between each pair of ranks, on all ranks; call on all.

    `messages` are those between this rank and single ones; those of rank 0 count. The two ends of a
    connection are matched by its addresses. Both count its bytes, and the smaller number is taken: no rank
    can claim traffic with another one that has not seen it. Bytes that belong to no message are those of
    sums, apart from some of MPI's own.
    """
    counted = allgather([list(messages), list(connections)], as_counters)
    owners: dict[str, int] = {}
    received: dict[tuple[str, str], int] = {}
    for rank, (_, rows) in enumerate(counted):
        for local, peer, _, num_received in rows:
            owners.setdefault(local, rank)
            received.setdefault((local, peer), num_received)
    added: Counter[tuple[str, int, int]] = Counter()
    for sender, (_, rows) in enumerate(counted):
        for local, peer, num_sent, _ in rows:
            if (receiver := owners.get(peer, sender)) != sender:
                added[SUMS, sender, receiver] += min(num_sent, received.get((peer, local), 0))
    for traffic_class, sender, receiver, num_bytes in counted[0][0]:
        added[traffic_class, sender, receiver] += num_bytes
        added[SUMS, sender, receiver] -= num_bytes
    return [SentBytes(*key, num_bytes) for key, num_bytes in added.items() if num_bytes > 0]


def as_counters(value: Any) -> Counters:
    """Check what one rank has counted."""
    messages, connections = value
    if not isinstance(messages, list) or not isinstance(connections, list):
        raise TypeError("expected two lists")
    return [_as_message(*row) for row in messages], [_as_connection(*row) for row in connections]


def _as_message(traffic_class: Any, sender: Any, receiver: Any, num_bytes: Any) -> Message:
    if traffic_class not in TRAFFIC_NAMES or traffic_class == SUMS:
        raise ValueError(f"expected one of {', '.join(TRAFFIC_NAMES[1:])}")
    ranks = as_count(sender, _LARGEST_RANK), as_count(receiver, _LARGEST_RANK)
    return str(traffic_class), *ranks, as_count(num_bytes, _LARGEST_COUNT)


def _as_connection(local: Any, peer: Any, num_sent: Any, num_received: Any) -> ConnectionRow:
    for endpoint in (local, peer):
        if not isinstance(endpoint, str) or len(endpoint) > _MAX_ENDPOINT:
            raise ValueError("expected an endpoint")
    return local, peer, as_count(num_sent, _LARGEST_COUNT), as_count(num_received, _LARGEST_COUNT)
