"""Bytes between the ranks of a group: to one rank, or from every rank to all of them, and their counters.

Whoever receives says how much it takes. A size is sent before its content, and no memory is allocated for a
larger one. Nothing here looks into the bytes. What was sent is what the ranks' kernels have counted.
"""

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any

from csdctl.worker.group.mpi import OnWait, World, ignore_wait, wait_sleeping
from csdctl.worker.group.values import PeerFaultError
from csdctl.worker.protocol.events import SUMS, TRAFFIC_NAMES, SentBytes
from csdctl.worker.protocol.json_codec import Between, MaxLength, OneOf, RankNumber

MAX_VALUE_BYTES = 1 << 18
"""Largest size of one rank's part of an `allgather`: several times that of a thousand byte counters."""
_SIZE = struct.Struct("<q")
_SIZE_TAG, _CONTENT_TAG, _GATHER_SIZE_TAG, _GATHER_TAG, _ALL_SIZES_TAG, _ALL_TAG = range(3, 9)
"""1 and 2 are those of the star (collective.py)."""

Bytes = bytes | bytearray | memoryview


class Departure:
    """Bytes on their way to `rank`, which must receive them."""

    def __init__(self, world: World, rank: int, content: Bytes) -> None:
        self._size, self._content = _SIZE.pack(len(content)), content
        self.num_bytes = len(content)
        parts = ((self._size, _SIZE_TAG), (content, _CONTENT_TAG))
        self._requests = [world.start_send(part, rank, tag) for part, tag in parts]

    def Test(self) -> bool:
        """Return whether all has left."""
        return all(request.Test() for request in self._requests)


class Arrival:
    """The bytes that `rank` sends next: at most `max_bytes`, which are received while this is tested."""

    def __init__(self, world: World, rank: int, max_bytes: int) -> None:
        self.rank, self.max_bytes = rank, max_bytes
        self.content = bytearray()
        self._world, self._size = world, bytearray(_SIZE.size)
        self._arriving = world.start_receive(memoryview(self._size), rank, _SIZE_TAG)
        self._has_size = False

    def Test(self) -> bool:
        """Return whether all has arrived; raises PeerFaultError for more than `max_bytes`."""
        if not self._arriving.Test():
            return False
        if self._has_size:
            return True
        self._has_size = True
        self.content = bytearray(_checked_size(self._size, self.rank, self.max_bytes))
        self._arriving = self._world.start_receive(memoryview(self.content), self.rank, _CONTENT_TAG)
        return self._arriving.Test()


def allgather(
    world: World, content: Bytes, max_bytes: int = MAX_VALUE_BYTES, on_wait: OnWait = ignore_wait
) -> list[bytes]:
    """Return every rank's bytes, in order of rank, on all ranks.

    All pass rank 0, so that no other rank can change what a third one sent. Raises PeerFaultError when a
    rank's are more than `max_bytes`.
    """
    if world.rank == 0:
        gathered = _gather(world, bytes(content), max_bytes, on_wait)
        _distribute(world, gathered, on_wait)
        return gathered
    for part, tag in ((_SIZE.pack(len(content)), _GATHER_SIZE_TAG), (content, _GATHER_TAG)):
        wait_sleeping(world.start_send(part, 0, tag), on_wait)
    sizes = memoryview(bytearray(_SIZE.size * world.size))
    wait_sleeping(world.start_receive(sizes, 0, _ALL_SIZES_TAG), on_wait)
    parts = [_checked_size(sizes[_SIZE.size * rank :], 0, max_bytes) for rank in range(world.size)]
    everything = bytearray(sum(parts))
    wait_sleeping(world.start_receive(memoryview(everything), 0, _ALL_TAG), on_wait)
    ends = accumulate(parts)
    return [bytes(everything[end - size : end]) for size, end in zip(parts, ends, strict=True)]


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


def _gather(world: World, own: bytes, max_bytes: int, on_wait: OnWait) -> list[bytes]:
    """Return every rank's bytes; on rank 0."""
    sizes = {rank: bytearray(_SIZE.size) for rank in range(1, world.size)}
    _receive_from_each(world, sizes, _GATHER_SIZE_TAG, on_wait)
    contents = {rank: bytearray(_checked_size(size, rank, max_bytes)) for rank, size in sizes.items()}
    _receive_from_each(world, contents, _GATHER_TAG, on_wait)
    return [own, *map(bytes, contents.values())]


def _receive_from_each(world: World, into: dict[int, bytearray], tag: int, on_wait: OnWait) -> None:
    """Fill the buffer of each rank with what that rank sends."""
    arriving = {rank: world.start_receive(memoryview(buffer), rank, tag) for rank, buffer in into.items()}

    def find_missing() -> list[int]:
        return [rank for rank, request in arriving.items() if not request.Test()]

    for request in arriving.values():
        wait_sleeping(request, on_wait, find_missing)


def _distribute(world: World, gathered: list[bytes], on_wait: OnWait) -> None:
    """Send all bytes to all ranks; on rank 0."""
    sizes, everything = b"".join(_SIZE.pack(len(part)) for part in gathered), b"".join(gathered)
    leaving = [
        world.start_send(part, rank, tag)
        for rank in range(1, world.size)
        for part, tag in ((sizes, _ALL_SIZES_TAG), (everything, _ALL_TAG))
    ]
    for request in leaving:
        wait_sleeping(request, on_wait)


def _checked_size(packed: Bytes, rank: int, max_bytes: int) -> int:
    (size,) = _SIZE.unpack_from(packed)
    if not 0 <= size <= max_bytes:
        raise PeerFaultError(rank, f"sent {size} bytes, expected at most {max_bytes}")
    return int(size)


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
