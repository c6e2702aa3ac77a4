"""What the ranks of a group have sent to each other, as their kernels count it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from csdctl.worker.group.waiting import OnWait, allgather, ignore_wait
from csdctl.worker.protocol.events import SUMS, SentBytes
from csdctl.worker.protocol.tcp_counters import list_connections


def gather_traffic(
    world: Any, messages: Sequence[tuple[str, int, int]] = (), on_wait: OnWait = ignore_wait
) -> list[SentBytes]:
    """Return the bytes sent between each pair of ranks, on all ranks; call on all.

    `messages` are those of this rank to single ranks: traffic class, receiver, bytes. The two ends of a
    connection are matched by its addresses. Bytes that belong to no message are those of sums, apart from
    some of MPI's own.
    """
    own = [(connection.local, connection.peer, connection.num_sent) for connection in list_connections()]
    counted = allgather(world, [list(messages), own], on_wait)
    owners = {local: rank for rank, (_, connections) in enumerate(counted) for local, _, _ in connections}
    added: Counter[tuple[str, int, int]] = Counter()
    for sender, (sent, connections) in enumerate(counted):
        for _, peer, num_bytes in connections:
            if (receiver := owners.get(peer, sender)) != sender:
                added[SUMS, sender, receiver] += num_bytes
        for traffic_class, receiver, num_bytes in sent:
            added[traffic_class, sender, receiver] += num_bytes
            added[SUMS, sender, receiver] -= num_bytes
    return [SentBytes(*key, num_bytes) for key, num_bytes in added.items() if num_bytes > 0]
