"""What the ranks of a group have sent to each other, as their kernels have counted it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from csdctl.worker.group.collective import gather
from csdctl.worker.protocol.events import SUMS, SentBytes
from csdctl.worker.protocol.tcp_counters import list_connections


def gather_traffic(
    world: Any,
    messages: Sequence[tuple[str, int, int]] = (),
    meanwhile: Callable[[float], None] = lambda waited_s: None,
) -> list[SentBytes]:
    """Bytes by pair of ranks, on all ranks; call on all.

    `messages` are what this rank has sent to single ranks: what, to whom, bytes. Who is at the other end of a
    connection tells the rank that has the same end as its own. What is in no message is of sums, but for
    MPI's own some bytes.
    """
    mine = [(one.local, one.peer, one.num_sent) for one in list_connections()]
    counted = gather(world, [list(messages), mine], meanwhile)
    owners = {local: rank for rank, (_, connections) in enumerate(counted) for local, _, _ in connections}
    added: Counter[tuple[str, int, int]] = Counter()
    for sender, (sent, connections) in enumerate(counted):
        for _, peer, num_bytes in connections:
            if (receiver := owners.get(peer, sender)) != sender:
                added[SUMS, sender, receiver] += num_bytes
        for what, receiver, num_bytes in sent:
            added[what, sender, receiver] += num_bytes
            added[SUMS, sender, receiver] -= num_bytes
    return [SentBytes(*key, num_bytes) for key, num_bytes in added.items() if num_bytes > 0]
