"""The ranks of several servers: each server sums with its nodes, the servers sum among themselves.

A node has a link with its server alone, and each server one with the others in addition. What a node sends is
checked by its server, before it goes on to the others (docs/decisions/0044).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from csdctl.worker.data.arrays import Array
from csdctl.worker.group.communicator import Communicator, LinkCommunicator
from csdctl.worker.group.messages import join_parts, joined_bytes, split_parts
from csdctl.worker.group.values import (
    ExpectedTails,
    LinkLostError,
    PeerFaultError,
    decode_values,
    encode_value,
)
from csdctl.worker.protocol.events import TRAFFIC_NAMES, SentBytes
from csdctl.worker.protocol.json_codec import Between, OneOf, RankNumber
from csdctl.worker.protocol.orders import STAR

_Row = tuple[
    Annotated[str, OneOf(TRAFFIC_NAMES)], RankNumber, RankNumber, Annotated[int, Between(0, 1 << 50)]
]


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
    """A group of several servers; `rank` and `size` are those of the whole group."""

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

    def choose_collective(self, wanted: str, sizes: Sequence[int] = ()) -> None:
        """Choose the collective of the servers; a server and its nodes use a star, which checks each node."""
        for link, _ in self._links:
            link.choose_collective(STAR if link is self._tunnel else wanted, sizes)
            self.collective, self.sum_s = link.collective, self.sum_s + link.sum_s

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
        import numpy as np

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
            return self._read(self._up.share(b"", limit_bytes), hint)
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
        return self._read(everything, hint)

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

    def _read(self, everything: bytes, hint: Any) -> list[Any]:
        try:
            return decode_values(hint, split_parts(everything, self.size))
        except ValueError:
            raise LinkLostError from None

    @contextlib.contextmanager
    def _faults_in(self, places: Sequence[int]) -> Iterator[None]:
        """Name the rank of the group that is at fault, in place of the rank of a link."""
        try:
            yield
        except PeerFaultError as fault:
            raise PeerFaultError(places[fault.rank], fault.message) from None
