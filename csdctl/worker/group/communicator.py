"""The interface to the other ranks of a group: for a rank alone, by a link, and on several servers.

A link takes in what other machines send, so its answers are not trusted either: their size is limited, and
their content is checked.
"""

import contextlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Annotated, Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.group import bf16
from csdctl.worker.group.channel import (
    LIMIT,
    SEND_HEAD,
    Answer,
    Channel,
    LinkGreeting,
    Request,
    SharedVectors,
)
from csdctl.worker.group.chunks import Chunk, divide
from csdctl.worker.group.messages import (
    MAX_VALUE_BYTES,
    ConnectionRows,
    NumBytes,
    gather_traffic,
    join_parts,
    joined_bytes,
    split_parts,
)
from csdctl.worker.group.values import (
    ExpectedTails,
    LinkLostError,
    PeerFaultError,
    SumSeconds,
    decode_value,
    decode_values,
    encode_value,
)
from csdctl.worker.protocol.events import TRAFFIC_NAMES, SentBytes
from csdctl.worker.protocol.json_codec import OneOf, RankNumber, Seconds
from csdctl.worker.protocol.orders import ALONE, COLLECTIVE_NAMES, STAR

MAX_FAULT_CHARACTERS = 300


class Communicator:
    """The ranks of one group; `rank` counts within it. This is the group of a rank alone.

    Every call that needs the others raises LinkLostError when the group is lost, and its subclass
    PeerFaultError when another rank has sent what no rank may send.
    """

    rank, size = 0, 1
    collective, sum_s = ALONE, 0.0
    """Name of the collective, and the seconds of a step's sums, as measured when the group was formed."""

    def __init__(self, local: Array) -> None:
        """`local`: the buffer where this rank's vector is best written; shape (n,), float32."""
        self.local = local
        self.waits: list[tuple[int, float]] = []
        """On rank 0 of a star: each rank that a sum has waited for, and the seconds; others clear it."""

    def sum(self, vector: Array, expected: ExpectedTails | None = None) -> Array:
        """Return the sum of `vector` over all ranks, bit-identical on all; valid until the next call.

        It is as long as the largest sum of a step; elements behind the end of the next sum are not sent.

        `expected`, on rank 0: what the ranks' vectors must end with.
        """
        return vector

    def find_not_finite(self) -> list[int]:
        """Return the other ranks whose latest vectors are not finite, on rank 0; [] where that is unknown."""
        return []

    def allgather(self, value: Any, hint: Any) -> list[Any]:
        """Return every rank's `value` (JSON), in order of rank, on all ranks.

        `hint` is the annotation of what a rank may send; anything else is that rank's fault.
        """
        return decode_values(hint, [encode_value(value)])

    def send(self, rank: int, content: Any, traffic_class: str, *, is_waiting: bool = True) -> None:
        """Send bytes to one rank, which must `receive` them; counted as traffic of `traffic_class`.

        Returns when they have left, unless `is_waiting` is False: they take memory of the link until then.
        """
        raise ValueError("there is no other rank")

    def expect(self, rank: int, max_bytes: int) -> None:
        """Let the next bytes that `rank` sends arrive before they are received, with the same `max_bytes`."""
        raise ValueError("there is no other rank")

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        """Return the bytes that `rank` sends; raises PeerFaultError when they are more than `max_bytes`."""
        raise ValueError("there is no other rank")

    def relay(self, source: int, target: int, max_bytes: int, traffic_class: str) -> None:
        """Pass on what `source` sends to `target`, if this rank is the server between them."""

    def traffic(self) -> list[SentBytes]:
        """Return what the ranks have sent to each other since they joined; call on all ranks."""
        return []

    def close(self) -> None:
        """Leave the group, all ranks together."""

    def disconnect(self) -> None:
        """Leave at once."""

    def interrupt(self) -> None:
        """Make the call that waits for other ranks raise LinkLostError; for other threads."""


def _split(joined: bytes | bytearray, count: int) -> list[bytes]:
    """Return what a link has joined; one that answers anything else is as good as lost."""
    try:
        return split_parts(joined, count)
    except ValueError:
        raise LinkLostError from None


class LinkCommunicator(Communicator):
    """The ranks of a group that are reached through a link."""

    def __init__(
        self,
        channel: Channel,
        greeting: LinkGreeting,
        vectors: SharedVectors,
        on_waiting: Callable[[list[int]], None],
    ) -> None:
        """`on_waiting` gets the ranks that a sum has been waiting for, every few seconds."""
        super().__init__(vectors.local)
        self.rank, self.size = greeting.rank, greeting.size
        self.collective = ""
        self._channel, self._vectors, self._on_waiting = channel, vectors, on_waiting
        self._next_chunks: Iterator[Sequence[Chunk]] = cycle([()])
        """Those of the sums from the next one on, where parts are sent as bfloat16; () if all is float32."""
        self._unpacked = self.local
        """The latest sum as float32."""
        self._messages: Counter[tuple[str, int, int]] = Counter()
        """Bytes of messages between this rank and another so far, by traffic class, sender and receiver."""
        channel.send_descriptor(vectors.descriptor)

    def choose_collective(self, wanted: str, sizes: Sequence[tuple[int, int]] = ()) -> None:
        """Choose the collective, on all ranks together; `wanted` names one instead of measuring.

        `sizes`: of each sum of a step, in their order: its elements, and how many of them are sent as
        bfloat16, an even number; by default one sum of the whole vector as float32.
        """
        if self.rank and any(num_halved for _, num_halved in sizes):
            self._next_chunks = cycle([divide(*size) for size in sizes])
            self._unpacked = self.local.copy()
        hint = tuple[Annotated[str, OneOf(COLLECTIVE_NAMES)], float]
        content = json.dumps([wanted, list(sizes)]).encode()
        self.collective, self.sum_s = self._read(hint, self._request(Request.CHOOSE, content))

    def sum(self, vector: Array, expected: ExpectedTails | None = None) -> Array:
        """Sum in the memory that is shared with the link."""
        if vector is not self.local:
            self.local[:] = vector
        chunks = next(self._next_chunks)
        bf16.pack(self.local, chunks)
        answer = self._request(Request.SUM, expected.pack() if expected and self.rank == 0 else b"")
        self.waits += self._read(tuple[tuple[RankNumber, Seconds], ...], answer) if answer else ()
        total: Array = self._vectors.total
        return bf16.unpack(total, chunks, self._unpacked) if chunks else total

    def add(self, expected: ExpectedTails | None) -> Array:
        """Return, on rank 0, the sum that the others await until `spread`; it may be changed before."""
        self._request(Request.ADD, expected.pack() if expected else b"")
        return self._vectors.total

    def spread(self) -> None:
        """Send the others what is in the array that `add` returned."""
        self._request(Request.SPREAD)

    def gather(self, content: bytes, max_bytes: int = MAX_VALUE_BYTES) -> list[bytes]:
        """Return every rank's bytes, at most `max_bytes` each, on rank 0, and [] on the others."""
        limit_bytes = joined_bytes(self.size, max_bytes)
        joined = self._request(Request.GATHER, LIMIT.pack(max_bytes) + content, limit_bytes)
        return _split(joined, 0 if self.rank else self.size)

    def share(self, content: bytes, max_bytes: int) -> bytes:
        """Return the `content` of rank 0, on all ranks."""
        received = self._request(Request.SHARE, LIMIT.pack(max_bytes) + content, max_bytes)
        return bytes(received) if self.rank else content

    def find_not_finite(self) -> list[int]:
        """Ask the link, which has the vectors on rank 0."""
        return self._read_ranks(self._request(Request.NOT_FINITE))

    def allgather(self, value: Any, hint: Any) -> list[Any]:
        """Gather through the link; raises PeerFaultError."""
        joined = self._request(Request.ALLGATHER, encode_value(value), 2 * self.size * MAX_VALUE_BYTES)
        return decode_values(hint, _split(joined, self.size))

    def send(self, rank: int, content: Any, traffic_class: str, *, is_waiting: bool = True) -> None:
        """Send through the link."""
        packed = memoryview(content).cast("B").tobytes()
        self._messages[traffic_class, self.rank, rank] += len(packed)
        self._request(Request.SEND, SEND_HEAD.pack(rank, is_waiting) + packed)

    def expect(self, rank: int, max_bytes: int) -> None:
        """Announce a message to the link."""
        self._request(Request.EXPECT, struct.pack("<qq", rank, max_bytes))

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        """Receive through the link."""
        received = self._request(Request.RECEIVE, struct.pack("<qq", rank, max_bytes), max_bytes)
        self._messages[traffic_class, rank, self.rank] += len(received)
        return received

    def traffic(self) -> list[SentBytes]:
        """Compare the counters of all ranks."""
        messages = [(*key, count) for key, count in self._messages.items()]
        connections = self._read(
            ConnectionRows, self._request(Request.CONNECTIONS, max_bytes=MAX_VALUE_BYTES)
        )
        return gather_traffic(self.allgather, messages, connections)

    def close(self) -> None:
        """Leave MPI, together with all other ranks; the link ends."""
        with contextlib.suppress(LinkLostError):
            self._request(Request.CLOSE)
        self._channel.close()

    def disconnect(self) -> None:
        """Drop a link that is of no more use; it ends when its channel closes."""
        self._channel.close()

    def interrupt(self) -> None:
        """End the channel for both sides."""
        self._channel.shut()

    def _request(self, letter: bytes, content: bytes = b"", max_bytes: int = 0) -> bytearray:
        # A link that has ended may have said before which rank's fault it is.
        with contextlib.suppress(LinkLostError):
            self._channel.send(letter, content)
        while True:
            letter, answer = self._channel.receive(max_bytes)
            if letter == Answer.DONE:
                return answer
            if letter == Answer.WAITING:
                self._on_waiting(self._read_ranks(answer))
            elif letter == Answer.FAULT:
                culprit, message = self._read(tuple[RankNumber, str], answer)
                self._check_ranks([culprit])
                raise PeerFaultError(culprit, message[:MAX_FAULT_CHARACTERS])
            else:
                raise LinkLostError

    @staticmethod
    def _read(hint: Any, answer: bytearray) -> Any:
        """Return the link's answer; a link that answers anything else is as good as lost."""
        try:
            return decode_value(hint, answer)
        except ValueError:
            raise LinkLostError from None

    def _read_ranks(self, answer: bytearray) -> list[int]:
        ranks = list(self._read(tuple[RankNumber, ...], answer))
        self._check_ranks(ranks)
        return ranks

    def _check_ranks(self, ranks: list[int]) -> None:
        if any(rank >= self.size for rank in ranks):
            raise LinkLostError


_Row = tuple[Annotated[str, OneOf(TRAFFIC_NAMES)], RankNumber, RankNumber, NumBytes]


def by_server(ranks: Sequence[int], servers: Sequence[int]) -> list[list[int]]:
    """Return the places in a group of the ranks of each server, its own first.

    `ranks` are those of the group, `servers` the rank of the server of every rank of the run.
    """
    places: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        places.setdefault(servers[rank], []).append(place)
    return [
        sorted(members, key=lambda place, server=server: (ranks[place] != server, place))  # type: ignore[misc]
        for server, members in sorted(places.items())
    ]


class TwoLevelCommunicator(Communicator):
    """A group of several servers: each sums with its nodes, then the servers sum among themselves.

    A node has a link with its server alone, and each server one with the others in addition. What a node
    sends is checked by its server, before it goes on to the others (docs/decisions/0044). `rank` and `size`
    are those of the whole group.
    """

    def __init__(
        self,
        rank: int,
        servers: Sequence[Sequence[int]],
        local: Array,
        tunnel: LinkCommunicator | None,
        between: LinkCommunicator | None,
    ) -> None:
        """`servers`: the places of the ranks of each; `tunnel` is None for a server without nodes, `between`
        for a node."""
        super().__init__(local)
        self.rank, self.size = rank, sum(map(len, servers))
        self._servers = servers
        self._own = next(members for members in servers if rank in members)
        self._leaders = [members[0] for members in servers]
        self._tunnel, self._between = tunnel, between

    @property
    def _links(self) -> list[tuple[LinkCommunicator, Sequence[int]]]:
        """The links of this rank, and the places of the ranks that they connect."""
        links = (self._tunnel, self._own), (self._between, self._leaders)
        return [(link, places) for link, places in links if link]

    def choose_collective(self, wanted: str, sizes: Sequence[tuple[int, int]] = ()) -> None:
        """Choose the collective of the servers; a server and its nodes use a star, which checks each node."""
        for link, _ in self._links:
            link.choose_collective(STAR if link is self._tunnel else wanted, sizes)
            self.collective, self.sum_s = link.collective, self.sum_s + link.sum_s
        if self._between:  # the servers wait for the slowest tunnel
            own_s = self._tunnel.sum_s if self._tunnel else 0.0
            with self._faults_in(self._leaders):
                slowest_s = max(self._between.allgather(own_s, SumSeconds))
            self.sum_s = slowest_s + self._between.sum_s

    def sum(self, vector: Array, expected: ExpectedTails | None = None) -> Array:
        """Sum at each server, then among the servers; the total goes back down."""
        if vector is not self.local:
            self.local[:] = vector
        if self._between is None:
            with self._faults_in(self._own):
                return self._up.sum(self.local)
        partial = self.local
        if self._tunnel:
            with self._faults_in(self._own):
                partial = self._tunnel.add(expected.of(self._own) if expected else None)
        with self._faults_in(self._leaders):
            total = self._between.sum(partial, expected.of_servers(self._servers) if expected else None)
        if self._tunnel is None:
            return total
        partial[:] = total
        self._tunnel.spread()
        return partial

    def find_not_finite(self) -> list[int]:
        """Return those of all servers, on rank 0; each server says it of itself and its nodes."""
        if self._between is None:
            return []
        own = self._tunnel.find_not_finite() if self._tunnel else []
        own += [] if self.rank == 0 or np.isfinite(self.local).all() else [0]
        with self._faults_in(self._leaders):
            found = self._between.allgather(own, tuple[RankNumber, ...])
        pairs = zip(self._servers, found, strict=True)
        return sorted(members[place] for members, places in pairs for place in places if place < len(members))

    def allgather(self, value: Any, hint: Any) -> list[Any]:
        """Gather at each server, then among the servers; the values of all go back down."""
        own, limit_bytes = encode_value(value), joined_bytes(self.size)
        if self._between is None:
            self._up.gather(own)
            return decode_values(hint, _split(self._up.share(b"", limit_bytes), self.size))
        parts = [own]
        if self._tunnel:
            with self._faults_in(self._own):
                parts = self._tunnel.gather(own)
                decode_values(hint, parts)
        with self._faults_in(self._leaders):
            everything = self._join(self._between.gather(join_parts(parts), limit_bytes))
            everything = self._between.share(everything, limit_bytes)
        if self._tunnel:
            self._tunnel.share(everything, limit_bytes)
        return decode_values(hint, _split(everything, self.size))

    def send(self, rank: int, content: Any, traffic_class: str, *, is_waiting: bool = True) -> None:
        """Send towards `rank`; the server between must `relay`."""
        link, place = self._towards(rank)
        link.send(place, content, traffic_class, is_waiting=is_waiting)

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        """Receive what comes from `rank`."""
        link, place = self._towards(rank)
        with self._faults_in(self._own if link is self._tunnel else self._leaders):
            return link.receive(place, max_bytes, traffic_class)

    def relay(self, source: int, target: int, max_bytes: int, traffic_class: str) -> None:
        """Pass on what `source` sends to `target`, if this rank is the server between them."""
        is_between = (source in self._own) != (target in self._own)
        if self._between and is_between and self.rank not in (source, target):
            self.send(target, self.receive(source, max_bytes, traffic_class), traffic_class)

    def traffic(self) -> list[SentBytes]:
        """Compare the counters at each server and among the servers; rank 0 gets all."""
        rows: list[_Row] = []
        for link, places in self._links:
            with self._faults_in(places):
                found = link.traffic()
            rows += [(one.what, places[one.sender], places[one.receiver], one.num_bytes) for one in found]
        if self._between is None:
            return []
        with self._faults_in(self._leaders):
            gathered = self._between.allgather(rows, tuple[_Row, ...])
        between = set(self._leaders)
        return [
            SentBytes(*row)
            for members, reported in zip(self._servers, gathered, strict=True)
            for row in reported
            # Of what is between the servers, rank 0 believes itself.
            if {row[1], row[2]} <= set(members) or (members is self._own and {row[1], row[2]} <= between)
        ]

    def close(self) -> None:
        """Leave the group, all ranks together."""
        for link, _ in self._links:
            link.close()

    def disconnect(self) -> None:
        """Leave at once."""
        for link, _ in self._links:
            link.disconnect()

    def interrupt(self) -> None:
        """End the channels of both levels."""
        for link, _ in self._links:
            link.interrupt()

    @property
    def _up(self) -> LinkCommunicator:
        """The link of a node with its server."""
        assert self._tunnel
        return self._tunnel

    def _towards(self, rank: int) -> tuple[LinkCommunicator, int]:
        """Return the link on the way to `rank`, and the next rank there."""
        if self._between is None:
            return self._up, 0
        if rank in self._own:
            return self._up, self._own.index(rank)
        server = next(place for place, members in enumerate(self._servers) if rank in members)
        return self._between, server

    def _join(self, blocks: Sequence[bytes]) -> bytes:
        """Return the parts of all ranks, in order of rank, from the block of each server, on rank 0."""
        parts: dict[int, bytes] = {}
        for server, block in enumerate(blocks):
            members = self._servers[server]
            try:
                parts.update(zip(members, split_parts(block, len(members)), strict=True))
            except ValueError as error:
                raise PeerFaultError(server, f"sent the parts of its nodes {error}") from None
        return join_parts([parts[place] for place in sorted(parts)])

    @contextlib.contextmanager
    def _faults_in(self, places: Sequence[int]) -> Iterator[None]:
        """Name the rank of the group that is at fault, in place of the rank of a link."""
        try:
            yield
        except PeerFaultError as fault:
            raise PeerFaultError(places[fault.rank], fault.message) from None
