"""Bytes between the ranks of a group: to one rank, or from every rank to all of them, and their counters.

Whoever receives says how much it takes. A size is sent before its content, and no memory is allocated for a
larger one. Nothing here looks into the bytes. What was sent is what the ranks' kernels have counted.
"""

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from csdctl.worker.group.mpi import OnWait, World, ignore_wait, wait_sleeping
from csdctl.worker.group.values import PeerFaultError, decode_values, encode_value
from csdctl.worker.protocol.events import SUMS, TRAFFIC_NAMES, SentBytes
from csdctl.worker.protocol.json_codec import Between, MaxLength, OneOf, RankNumber

MAX_VALUE_BYTES = 1 << 18
"""Largest size of one rank's part of an `allgather`: several times that of a thousand byte counters."""
_SIZE = struct.Struct("<q")
Tags = tuple[int, int]
MESSAGE, GATHERED, SPREAD = (3, 4), (5, 6), (7, 8)
"""Tags of size and content: of a message to one rank, and of an `allgather` to and from rank 0.

1 and 2 are those of the star (collective.py).
"""

Bytes = bytes | bytearray | memoryview


class Departure:
    """Bytes on their way to `rank`, which must receive them."""

    def __init__(self, world: World, rank: int, content: Bytes, tags: Tags = MESSAGE) -> None:
        self._size, self._content = _SIZE.pack(len(content)), content
        self.num_bytes = len(content)
        parts = zip((self._size, content), tags, strict=True)
        self._requests = [world.start_send(part, rank, tag) for part, tag in parts]

    def Test(self) -> bool:
        """Return whether all has left."""
        return all(request.Test() for request in self._requests)


class Arrival:
    """The bytes that `rank` sends next: at most `max_bytes`, which are received while this is tested."""

    def __init__(self, world: World, rank: int, max_bytes: int, tags: Tags = MESSAGE) -> None:
        self.rank, self.max_bytes = rank, max_bytes
        self.content = bytearray()
        self._world, self._size, self._tags = world, bytearray(_SIZE.size), tags
        self._arriving = world.start_receive(memoryview(self._size), rank, tags[0])
        self._has_size = False

    def Test(self) -> bool:
        """Return whether all has arrived; raises PeerFaultError for more than `max_bytes`."""
        if not self._arriving.Test():
            return False
        if self._has_size:
            return True
        self._has_size = True
        (size,) = _SIZE.unpack(self._size)
        if not 0 <= size <= self.max_bytes:
            raise PeerFaultError(self.rank, f"sent {size} bytes, expected at most {self.max_bytes}")
        self.content = bytearray(size)
        self._arriving = self._world.start_receive(memoryview(self.content), self.rank, self._tags[1])
        return self._arriving.Test()


def allgather(
    world: World, content: Bytes, max_bytes: int = MAX_VALUE_BYTES, on_wait: OnWait = ignore_wait
) -> list[bytes]:
    """Return every rank's bytes, in order of rank, on all ranks.

    All pass rank 0, so that no other rank can change what a third one sent. Raises PeerFaultError when a
    rank's are more than `max_bytes`.
    """
    gathered = gather(world, content, max_bytes, on_wait)
    joined = spread(world, join_parts(gathered), joined_bytes(world.size, max_bytes), on_wait)
    try:
        return gathered or split_parts(joined, world.size)
    except ValueError as error:
        raise PeerFaultError(0, f"sent the parts of all ranks {error}") from None


def joined_bytes(count: int, max_bytes: int = MAX_VALUE_BYTES) -> int:
    """Return the largest size of what `join_parts` makes of `count` parts."""
    return count * (_SIZE.size + max_bytes)


def gather(
    world: World, content: Bytes, max_bytes: int = MAX_VALUE_BYTES, on_wait: OnWait = ignore_wait
) -> list[bytes]:
    """Return every rank's bytes, in order of rank, on rank 0, and [] on the others; raises PeerFaultError."""
    if world.rank:
        wait_sleeping(Departure(world, 0, content, GATHERED), on_wait)
        return []
    arriving = [Arrival(world, rank, max_bytes, GATHERED) for rank in range(1, world.size)]
    for one in arriving:
        wait_sleeping(one, on_wait, lambda: [other.rank for other in arriving if not other.Test()])
    return [bytes(content), *(bytes(one.content) for one in arriving)]


def spread(world: World, content: Bytes, max_bytes: int, on_wait: OnWait = ignore_wait) -> Bytes:
    """Return the `content` of rank 0, on all ranks; raises PeerFaultError for more than `max_bytes`."""
    if world.rank:
        joined = Arrival(world, 0, max_bytes, SPREAD)
        wait_sleeping(joined, on_wait)
        return joined.content
    for departure in [Departure(world, rank, content, SPREAD) for rank in range(1, world.size)]:
        wait_sleeping(departure, on_wait)
    return content


def gather_values(world: World, value: Any, hint: Any, on_wait: OnWait = ignore_wait) -> list[Any]:
    """Return every rank's `value` (JSON), on all ranks; raises PeerFaultError for what `hint` excludes."""
    return decode_values(hint, allgather(world, encode_value(value), on_wait=on_wait))


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Return several byte strings as one."""
    return b"".join(piece for part in parts for piece in (_SIZE.pack(len(part)), part))


def split_parts(joined: Bytes, count: int) -> list[bytes]:
    """Return the `count` byte strings that `join_parts` joined; raises ValueError."""
    parts, rest = [], memoryview(joined)
    for _ in range(count):
        size = _SIZE.unpack(rest[: _SIZE.size])[0] if len(rest) >= _SIZE.size else -1
        if not 0 <= size <= len(rest) - _SIZE.size:
            raise ValueError("cut short")
        parts.append(bytes(rest[_SIZE.size : _SIZE.size + size]))
        rest = rest[_SIZE.size + size :]
    return parts


NumBytes = Annotated[int, Between(0, 1 << 50)]
Endpoint = Annotated[str, MaxLength(80)]
"""An IPv6 address with its zone, and a port."""
ConnectionRows = tuple[tuple[Endpoint, Endpoint, NumBytes, NumBytes], ...]
"""Local and peer endpoint of each connection, bytes sent and received."""
Message = tuple[Annotated[str, OneOf(TRAFFIC_NAMES[1:])], RankNumber, RankNumber, NumBytes]
"""Traffic class, which is not that of sums, sender, receiver and bytes."""
Counters = tuple[tuple[Message, ...], ConnectionRows]
"""Messages that one rank has sent or received, and its connections."""
DRAIN_S = 1.0
"""Longest time that bytes may be on their way: a peer that is gone acknowledges nothing."""


def gather_traffic(
    allgather: Callable[[Any, Any], Sequence[Counters]],
    messages: Sequence[Message],
    connections: ConnectionRows,
) -> list[SentBytes]:
    """Return the bytes sent between each pair of ranks, on all ranks; call on all.

    `messages` are those between this rank and single ones; those of rank 0 count. The two ends of a
    connection are matched by its addresses. Both count its bytes, and the smaller number is taken: no rank
    can claim traffic with another one that has not seen it. Bytes that belong to no message are those of
    sums, apart from some of MPI's own.
    """
    counted = allgather((messages, connections), Counters)
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
