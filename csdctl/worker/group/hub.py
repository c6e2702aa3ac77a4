"""The hub of a machine: it adds the vectors of the ranks behind it and tracks membership.

It is a process of its own beside rank 0, or the rank of a server, to which the link of each node connects
(link.py). It adds vectors in order of rank, and hands the sum back with a verdict: which ranks it counts, and
which take part next. A rank whose link is lost is left out of the sum. No other rank waits for it.

The hub of a server sends its sum as a vector to the hub of the host, its parent, and passes the answer on.

Messages of links are not trusted: sizes are limited, the end of every vector is compared with what it must
be, and a vector that is not finite is left out. A rank that breaks a rule is lost, and no other.
"""

import contextlib
import functools
import math
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.group.bf16 import read_chunk, write_chunk
from csdctl.worker.group.channel import (
    MAX_NOTE_BYTES,
    MAX_VALUE_BYTES,
    MAX_VALUES_BYTES,
    NUMBER,
    Channel,
    Letter,
    LinkSettings,
    Listener,
    join_parts,
    split_parts,
)
from csdctl.worker.group.chunks import Chunk, SumSizes, divide
from csdctl.worker.group.shared_memory import map_array, share_vector
from csdctl.worker.group.values import (
    MAX_REASON,
    LinkLostError,
    decode_value,
    encode_value,
    find_fault,
    is_minority,
)
from csdctl.worker.protocol.json_codec import Count, RankNumber, ShortText, from_json, to_json
from csdctl.worker.protocol.sandbox import hub_address, link_address

WAITING_INTERVAL_S = 5.0
NUM_TAIL = 4
"""Elements at the end of a vector, besides the seconds of each rank."""
MAX_HELD_BYTES = 64 << 20
"""Limit of unsent bytes to the rank or the parent; above it, links are not read."""


@dataclass(frozen=True)
class HubSettings:
    """What a rank tells its hub, with the descriptors of its vector and of the sum."""

    run_id: str
    rank: RankNumber
    key: str
    """The secret in the socket addresses for links of the ranks behind this hub."""
    node_key: str
    """The secret in the socket address for a server's link to the host."""
    servers: tuple[RankNumber, ...]
    sizes: SumSizes
    max_bytes: Count


@dataclass(frozen=True)
class Verdict:
    """The ranks that took part in an operation, and the ranks of the next operation."""

    members: tuple[RankNumber, ...]
    counted: tuple[RankNumber, ...]
    """The ranks whose vectors are in the sum, or whose values are there."""


Lost = tuple[tuple[RankNumber, ShortText, bool], ...]
"""Ranks that are lost, why, and whether they have violated the protocol."""


@dataclass
class _Child:
    """A link of the hub, the rank at its other end, and the ranks behind it."""

    rank: int
    channel: Channel
    behind: tuple[int, ...]
    is_server: bool
    vector: Array
    """Its latest vector, in the form of the wire."""
    tail: Array
    """A copy of the vector's end, as it was added. The link's process can change the vector at any time."""
    num_parts: int = 0
    ranks: tuple[int, ...] = ()
    """The ranks in its vector, once the vector is complete."""
    completed_s: float = 0.0
    num_voided: int = 0
    """Aborted steps that it has not confirmed yet. Until then, its messages belong to them."""
    traffic: tuple[int, int] | None = None
    """Bytes that the link has sent and received; None until it reports them."""


class Hub:
    """Serves one rank and the links of the ranks behind it, until the rank ends.

    The hub of a server also has a parent, the hub of the host.
    """

    _held: dict[int, bytes | bytearray] | None = None
    """On a server, the JOIN messages of the ranks behind it until its own rank has joined. Otherwise None."""

    def __init__(self, rank: Channel, settings: HubSettings, local: int, total: int) -> None:
        """`local`, `total`: descriptors of the rank's vector and of the sum."""
        self._rank, self._settings, self._me = rank, settings, settings.rank
        rank.max_bytes = settings.max_bytes + MAX_VALUES_BYTES
        self._local, self._total = map_array(local), map_array(total)
        self._partials = np.empty_like(self._local), np.empty_like(self._local)
        """The sum of the nodes, and of the servers. Vectors arrive while the rank may still read `total`."""
        self._chunks = [divide(*size) for size in settings.sizes]
        self._wire, wire = self._total, total
        """This machine's sum in the form of the wire: from the host to links, from a server to its parent."""
        if self._me or any(num_halved for _, num_halved in settings.sizes):
            self._wire, wire = share_vector(len(self._total))
        self._up_descriptors, self._down_descriptor = (wire, total), total if self._me else wire
        self._listeners = [
            Listener(hub_address(settings.run_id, child, settings.key), child)
            for child, server in enumerate(settings.servers)
            if child != self._me and (server == self._me or (self._me == 0 and server == child))
        ]
        self._parent: Channel | None = None
        self._above = [rank]
        """The hub ends with any of these channels. Messages about the run go to the last one."""
        self._children: dict[int, _Child] = {}
        self._present: list[_Child] = []
        """The links whose ranks take part: nodes in order of rank, then servers."""
        self._members: set[int] = {self._me}
        self._joined: set[int] = set()
        self._announced: tuple[int, ...] = (self._me,)
        self._admitted: set[int] = set()
        self._dropped: set[int] = set()
        """On a server, ranks that were lost since the latest verdict. The verdict may still count them."""
        self._voided: Counter[int] = Counter()
        """On the host, how many aborted steps each rank has not confirmed yet."""
        self._values: dict[int, tuple[bytes, bytes]] = {}
        """On the host, values of ranks, or their end, that belong to no operation yet."""
        self._request: tuple[bytes, bytearray] | None = None
        self._requested_s = self._reported_s = 0.0
        self._has_passed, self._num_voided = False, 0
        """On a server, whether the parent has this machine's part of the rank's request, and the number of
        aborted steps that the rank has not confirmed yet."""
        self._verdict = b""
        """On a server, the parent's verdict on the sum."""
        self._number = self._num_published = 0
        """The number of the sum within the step, and how many of its chunks have left."""
        self._is_stale = False
        self._counted = [self._me]
        """The ranks in the previous sum of the step."""
        self._poll = select.epoll()
        self._sources: dict[int, tuple[Any, Callable[[], None]]] = {}
        """By descriptor: a channel or listener, and the function that reads from it."""

    def await_parent(self) -> None:
        """Wait, on a server, for the link to the host. Raises LinkLostError when the rank ends."""
        settings, rank = self._settings, self._rank

        def check() -> None:
            if select.select([rank], [], [], 0)[0]:
                raise LinkLostError

        address = link_address(settings.run_id, settings.rank, settings.node_key)
        with contextlib.closing(Listener(address, settings.rank)) as listener:
            rank.send(Letter.OPEN)
            parent = self._parent = listener.await_link(check)
        parent.max_bytes = settings.max_bytes + MAX_VALUES_BYTES
        self._held = {}
        parent.send_descriptors(*self._up_descriptors)
        parent.send(Letter.OPEN, to_json(LinkSettings(settings.sizes, parent.max_bytes, True)).encode())
        self._above.append(parent)
        self._watch(parent, lambda: self._take_above(parent, self._process_parent))

    def serve(self) -> None:
        """Serve until the rank has closed its channel."""
        self._begin_vector(0)
        self._watch(self._rank, lambda: self._take_above(self._rank, self._process_rank))
        for listener in self._listeners:
            self._watch(listener, functools.partial(self._accept, listener))
        with contextlib.suppress(LinkLostError):
            while True:
                self._wait()
                self._advance()

    def _watch(self, source: Any, read: Callable[[], None]) -> None:
        self._sources[source.fileno()] = source, read
        self._poll.register(source, select.EPOLLIN)

    def _wait(self) -> None:
        """Take the messages that have arrived, or wait for some. Raises LinkLostError when the rank ends."""
        links = [child.channel for child in self._children.values()]
        for channel in (*self._above, *links):
            channel.flush()
        is_full = any(len(channel.unsent) > MAX_HELD_BYTES for channel in self._above)
        blocked = [channel for channel in (*self._above, *links) if channel.unsent]
        special = {*blocked, *links} if is_full else blocked
        for channel in special:
            reading = 0 if is_full and channel not in self._above else select.EPOLLIN
            self._poll.modify(channel, reading | (select.EPOLLOUT if channel.unsent else 0))
        events = self._poll.poll(WAITING_INTERVAL_S if self._request else None)
        for channel in special:
            self._poll.modify(channel, select.EPOLLIN)
        for descriptor, _ in events:
            if descriptor in self._sources:  # it may have been lost meanwhile
                self._sources[descriptor][1]()
        if self._request and time.monotonic() - self._reported_s > WAITING_INTERVAL_S:
            self._reported_s = time.monotonic()
            if missing := self._find_missing(self._request[0]):
                self._rank.post(Letter.WAITING, encode_value(missing))

    def _find_missing(self, letter: bytes) -> list[int]:
        if letter == Letter.VECTOR:
            return [child.rank for child in self._present if not child.ranks and not self._has_passed]
        return sorted(self._members - {self._me, *self._values})

    # Links

    def _accept(self, listener: Listener) -> None:
        channel = listener.accept()
        if channel is None:
            return
        settings, rank = self._settings, listener.rank
        behind = tuple(node for node, server in enumerate(settings.servers) if rank in (node, server))
        vector, descriptor = share_vector(len(self._local))
        if rank in self._children:
            self._lose(self._children[rank], "its link was restarted")
        # The same memory, for a process that cannot write to it.
        sent = os.open(f"/proc/self/fd/{self._down_descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        channel.max_bytes = settings.max_bytes + MAX_NOTE_BYTES
        with contextlib.suppress(LinkLostError):  # `take` finds its end
            channel.send_descriptors(descriptor, sent)
        channel.post(Letter.OPEN, to_json(LinkSettings(settings.sizes, channel.max_bytes, True)).encode())
        os.close(sent)
        os.close(descriptor)
        tail = np.zeros(NUM_TAIL + len(settings.servers), np.float32)
        is_server = settings.servers[rank] == rank
        child = _Child(rank, channel, behind, is_server=is_server, vector=vector, tail=tail)
        self._children[rank] = child
        self._watch(channel, functools.partial(self._take, child))

    def _take(self, child: _Child) -> None:
        try:
            for letter, content in child.channel.take():
                if self._children.get(child.rank) is child:  # it may have said that it is lost
                    self._process(child, letter, content)
        except LinkLostError:
            self._lose(child, "its link was lost")
        except ValueError as error:
            self._lose(child, f"sent an invalid message: {error}", is_fault=True)

    def _process(self, child: _Child, letter: bytes, content: bytearray) -> None:
        if letter == Letter.TRAFFIC:
            child.traffic = decode_value(tuple[Count, Count], content)
        elif letter == Letter.NOTE:
            self._note_losses(child, decode_value(Lost, content))
        elif letter in Letter.WITH_SENDER:
            self._process_sent(child, letter, content)
        elif child.num_voided:
            return
        elif letter == Letter.CHUNK:
            child.num_parts += 1
            if child.num_parts > len(self._chunks[self._number]):
                raise ValueError("more chunks than the vector has")
            if child.num_parts == len(self._chunks[self._number]) and not child.is_server:
                self._complete_vector(child, (child.rank,))
        elif letter == Letter.VECTOR and child.is_server:
            self._complete_vector(child, decode_value(tuple[RankNumber, ...], content))
        else:
            raise ValueError("an unexpected message")

    def _process_sent(self, child: _Child, letter: bytes, content: bytearray) -> None:
        (sender,) = NUMBER.unpack_from(content) if len(content) >= NUMBER.size else (-1,)
        if sender not in child.behind:
            raise ValueError("a message in the name of another rank")
        if letter == Letter.JOIN:
            if sender in self._members:
                raise ValueError("a second JOIN of a member")
            self._joined.add(sender)
        elif sender == child.rank and letter == Letter.VOIDED:
            if not child.num_voided:
                raise ValueError("an abort of a step that rank 0 did not abort")
            child.num_voided -= 1
        elif sender == child.rank and child.num_voided:
            return
        elif letter != Letter.DATA and len(content) > NUMBER.size + MAX_VALUE_BYTES:
            raise ValueError(f"a value of {len(content) - NUMBER.size} bytes")
        if letter == Letter.JOIN and self._held is not None:
            self._held[sender] = content
        elif self._parent:
            self._parent.post(letter, content)
        else:
            self._process_on_host(sender, letter, content)

    def _process_on_host(self, sender: int, letter: bytes, content: bytearray) -> None:
        if letter == Letter.VOIDED:
            self._voided[sender] -= 1
        elif letter == Letter.JOIN or (letter == Letter.DATA and not self._voided[sender]):
            self._rank.post(letter, content)
        elif not self._voided[sender]:
            if sender in self._values or sender not in self._members:
                self._evict(sender, "sent an invalid message: an unexpected message")
            else:
                self._values[sender] = letter, bytes(content[NUMBER.size :])

    def _complete_vector(self, child: _Child, ranks: Sequence[int]) -> None:
        if child.ranks or child.num_parts < len(self._chunks[self._number]) or child.rank not in ranks:
            raise ValueError("a vector that is unexpected, incomplete or of other ranks")
        if not set(ranks) <= self._members & set(child.behind):
            raise ValueError("a vector of ranks that are not members")
        child.ranks, child.completed_s = tuple(sorted(set(ranks))), time.monotonic()

    def _note_losses(self, child: _Child, lost: Lost) -> None:
        """Continue without the ranks that a link, or a server, reports as lost."""
        for rank, reason, is_fault in lost:
            if rank == child.rank:
                self._lose(child, reason, is_fault=is_fault)
            elif rank in child.behind:
                self._drop((rank,), reason, is_fault=is_fault)
            else:
                raise ValueError("the loss of another rank")

    def _lose(self, child: _Child, reason: str, *, is_fault: bool = False) -> None:
        if self._children.get(child.rank) is child:
            del self._children[child.rank]
            del self._sources[child.channel.fileno()]
            child.channel.close()
        if not self._has_passed:
            self._begin_adding()
        self._drop(child.behind, reason, is_fault=is_fault)

    def _drop(self, ranks: Collection[int], reason: str, *, is_fault: bool) -> None:
        present = (self._members | self._joined) & set(ranks)
        lost = [(rank, reason[:MAX_REASON], is_fault) for rank in sorted(present)]
        for ranks_of_a_kind in (self._members, self._joined, self._admitted):
            ranks_of_a_kind.difference_update(present)
        for rank in present:
            for of_ranks in (self._values, self._voided, self._held or {}):
                of_ranks.pop(rank, None)
        self._dropped |= present
        self._arrange()
        if lost:
            self._above[-1].post(Letter.NOTE, encode_value(lost))

    def _send(self, target: int, letter: bytes, content: bytes | bytearray) -> None:
        if target == self._me:
            self._rank.post(letter, content)
        for child in self._children.values():
            if target in child.behind:
                child.channel.post(letter, content)

    def _arrange(self) -> None:
        present = [child for child in self._children.values() if child.rank in self._members]
        self._present = sorted(present, key=lambda child: (child.is_server, child.rank))

    # Requests of the rank, and answers of the parent

    def _take_above(self, channel: Channel, process: Callable[[bytes, bytearray], None]) -> None:
        for letter, content in channel.take():
            process(letter, content)

    def _process_rank(self, letter: bytes, content: bytearray) -> None:
        """Carry out a request of the rank, or keep it until all parts have arrived."""
        if self._parent and letter in Letter.WITH_SENDER:
            self._num_voided -= letter == Letter.VOIDED
            self._parent.post(letter, content)
            if letter == Letter.JOIN:  # a node takes part after its server
                for held in (self._held or {}).values():
                    self._parent.post(letter, held)
                self._held = None
        elif letter == Letter.ADMIT:
            self._admitted |= set(decode_value(tuple[RankNumber, ...], content)) & self._joined
        elif letter in (Letter.DATA, Letter.NOTE):
            self._pass_down(letter, content)
        elif letter == Letter.VOID:
            present = self._present
            # Not those that are admitted now: they get no VOID.
            self._voided.update(self._members & {rank for child in present for rank in child.behind})
            self._void(present, self._decide(()))
        elif letter != Letter.VOIDED and not self._num_voided:
            self._request = letter, content
            self._requested_s = self._reported_s = time.monotonic()
            if letter == Letter.TRAFFIC:
                for child in self._children.values():
                    child.traffic = None
                    child.channel.post(letter)

    def _pass_down(self, letter: bytes, content: bytearray) -> None:
        if letter == Letter.DATA:
            return self._send(NUMBER.unpack_from(content)[0], letter, content)
        for rank, reason, _ in decode_value(Lost, content):
            self._evict(rank, reason)

    def _evict(self, rank: int, reason: str) -> None:
        if rank in self._children:
            self._lose(self._children[rank], reason, is_fault=True)
        else:  # its server loses it, and says so
            self._send(rank, Letter.NOTE, encode_value([[rank, reason, True]]))

    def _process_parent(self, letter: bytes, content: bytearray) -> None:
        """Pass on a message of the parent. Note which ranks take part next."""
        present = self._present
        if letter == Letter.CHUNK:
            self._pass_chunk(present)
        elif letter == Letter.AGAIN:
            self._is_stale = True
            for child in present:
                child.channel.post(letter)
        elif letter == Letter.TOTAL:
            self._verdict = bytes(content)
        elif letter == Letter.VALUES:
            self._take_members(split_parts(content)[0])
            self._deliver_values(present, content)
        elif letter == Letter.VOID:
            self._take_members(content)
            self._num_voided += 1
            self._void(present, bytes(content))
        elif letter == Letter.ADMIT:
            self._set_members(decode_value(tuple[RankNumber, ...], content))
        elif letter == Letter.CLOSE:
            self._close()
        else:
            self._pass_down(letter, content)

    def _pass_chunk(self, present: Sequence[_Child]) -> None:
        """Pass on a chunk of the sum. The last one ends the sum, unless all chunks are sent again."""
        if self._num_published + 1 < len(self._chunks[self._number]):
            self._publish(present)
        elif self._is_stale:
            self._publish(present)
            self._num_published, self._is_stale = 0, False
        else:
            self._take_members(self._verdict[1:])
            self._end_sum(present, self._verdict)

    def _take_members(self, verdict: bytes | bytearray) -> None:
        if verdict:
            self._set_members(from_json(Verdict, bytes(verdict).decode()).members)
        self._dropped = set()

    def _set_members(self, members: Sequence[int]) -> None:
        self._announced = tuple(members)
        self._members = set(members) & {self._me, *self._children} - self._dropped
        self._joined -= self._members
        self._arrange()

    def _advance(self) -> None:
        while not self._has_passed:  # then the parent has it
            self._add()
            if not self._request or not self._do(*self._request):
                return

    def _do(self, letter: bytes, content: bytearray) -> bool:
        """Carry out this machine's part of a request. Return False while something is missing."""
        if letter == Letter.VECTOR:
            return self._sum(content)
        if letter == Letter.TRAFFIC:
            return self._count_traffic(self._present)
        for rank in [rank for rank, (sent, _) in self._values.items() if sent != letter]:
            del self._values[rank]
            self._evict(rank, "sent an unexpected message")
        if not self._members <= {self._me, *self._values}:
            return False
        if letter == Letter.CLOSE:
            self._close()
            return True
        self._values[self._me] = letter, bytes(content[NUMBER.size :])
        values, present = dict(sorted(self._values.items())), self._present
        self._values.clear()
        decided = self._decide(values)
        self._deliver_values(present, join_parts([decided, *(value for _, value in values.values())]))
        return True

    def _end_request(self) -> None:
        self._request, self._has_passed = None, False

    def _decide(self, counted: Iterable[int], *, is_end: bool = True) -> bytes:
        """Return the `Verdict` as JSON, b'' if the same ranks take part as before.

        Ranks are admitted if the step ends (`is_end`).
        """
        before, admitted = self._announced, self._admitted if is_end else set()
        self._members |= admitted
        self._arrange()
        self._joined -= admitted
        self._admitted = self._admitted - admitted
        ranks, self._announced = tuple(sorted(counted)), tuple(sorted(self._members))
        for child in self._children.values():
            if child.is_server and child.rank in admitted:  # its rank gets this with the state
                child.channel.post(Letter.ADMIT, encode_value(self._announced))
        return (
            b"" if ranks == before == self._announced else to_json(Verdict(self._announced, ranks)).encode()
        )

    # Sums

    def _begin_vector(self, number: int) -> None:
        self._number, self._verdict = number, b""
        self._num_published = 0
        for child in self._children.values():
            child.ranks, child.num_parts = (), 0
        self._begin_adding()

    def _begin_adding(self) -> None:
        """Add the chunks again from the first one on, because chunks that were sent are wrong."""
        self._next_chunk, self._next_child, self._is_finite = 0, 0, True
        self._is_stale = self._num_published > 0

    def _add(self) -> None:
        """Add the chunks that have arrived, in order of rank. Stop at the first that is missing."""
        chunks, present = self._chunks[self._number], self._present
        while self._next_chunk < len(chunks):
            chunk = chunks[self._next_chunk]
            while self._next_child < len(present):
                child = present[self._next_child]
                if child.num_parts <= self._next_chunk:
                    return
                is_first = not self._next_child or present[self._next_child - 1].is_server < child.is_server
                partial = self._partials[child.is_server][chunk.elements]
                arrived = read_chunk(child.vector, chunk)
                if chunk.elements.stop > chunks[-1].elements.stop - len(child.tail):
                    arrived = self._copy_tail(child, chunk, arrived)
                if is_first:
                    partial[:] = arrived
                else:
                    np.add(partial, arrived, out=partial)
                self._next_child += 1
            # Only then does the rank no longer read the latest sum. Nor do the others, which have sent this.
            if not self._request or self._request[0] != Letter.VECTOR:
                return
            self._complete(chunk, {child.is_server for child in present})
            # Before the ends of all vectors are checked, no rank has the whole sum.
            if not self._parent and self._num_published == self._next_chunk < len(chunks) - 1:
                self._publish(present)
            self._next_chunk, self._next_child = self._next_chunk + 1, 0

    def _copy_tail(self, child: _Child, chunk: Chunk, arrived: Array) -> Array:
        """Return a copy of a chunk that has a part of the vector's end. The end is checked in this copy."""
        copied, num_left = arrived.copy(), self._chunks[self._number][-1].elements.stop - chunk.elements.stop
        places = np.arange(len(child.tail) - num_left)[-len(copied) :]
        child.tail[places] = copied[-len(places) :]
        return copied

    def _complete(self, chunk: Chunk, parts: Collection[bool]) -> None:
        """Add the rank's vector to a chunk of its nodes, then of servers: the `parts` of `_partials`."""
        into = (self._partials[False] if self._parent else self._total)[chunk.elements]
        summed = self._local[chunk.elements]
        for part in sorted(parts):
            summed = np.add(self._partials[part][chunk.elements], summed, out=into)
        if summed is not into:
            into[:] = summed
        self._is_finite &= math.isfinite(float(np.add.reduce(into)))
        if self._wire is not self._total:
            write_chunk(self._wire, into, chunk)
            if not self._parent:
                into[:] = read_chunk(self._wire, chunk)  # rounded as for the others

    def _publish(self, present: Sequence[_Child]) -> None:
        self._num_published += 1
        for child in present:
            child.channel.post(Letter.CHUNK)

    def _sum(self, content: bytearray) -> bool:
        if not self._is_added(content):
            return False
        present, num_chunks = self._present, len(self._chunks[self._number])
        counted = sorted([self._me, *(rank for child in present for rank in child.ranks)])
        if self._parent:
            self._has_passed = True
            self._parent.post(Letter.VECTOR, encode_value(counted))
            return True
        if self._is_stale:
            for child in present:
                child.channel.post(Letter.AGAIN)
            for _ in range(num_chunks):
                self._publish(present)
        # Several sums of one step are of the same ranks, or the step is void.
        is_void = self._number > 0 and counted != self._counted
        self._counted = counted
        is_end = is_void or self._number + 1 == len(self._chunks)
        decided = self._decide(counted, is_end=is_end)
        self._end_sum(present, bytes([is_void]) + decided if is_void or decided else b"")
        return True

    def _is_added(self, content: bytearray) -> bool:
        """Return whether all vectors are added. A link whose vector breaks a rule is lost."""
        present = self._present
        if self._next_chunk < len(self._chunks[self._number]) or not all(child.ranks for child in present):
            return False
        checks_finite, rows = decode_value(tuple[bool, tuple[tuple[RankNumber, float], ...]], content)
        counts = dict(rows)
        checked = [(child, find_fault(child.tail, counts, child.ranks)) for child in present if counts]
        faults = [(child, reason) for child, reason in checked if reason]
        if not faults and checks_finite:
            faults = self._find_not_finite(present)
        for child, reason in faults:
            self._lose(child, reason, is_fault=True)
        if faults:
            self._add()
            return self._is_added(content)
        return True

    def _find_not_finite(self, present: Sequence[_Child]) -> list[tuple[_Child, str]]:
        """Return a minority of links whose vectors are not finite. [] for more: the training diverges."""
        chunks = self._chunks[self._number]
        size = chunks[-1].elements.stop
        if self._is_finite or not np.isfinite(self._local[:size]).all():
            return []

        def is_finite(vector: Array) -> bool:
            return all(np.isfinite(read_chunk(vector, chunk)).all() for chunk in chunks)

        wrong = [child for child in present if not is_finite(child.vector)]
        ranks = [rank for child in wrong for rank in child.ranks]
        reason = "sent a gradient that is not finite, such as from samples with NaN"
        return [(child, reason) for child in wrong] if is_minority(ranks, len(self._announced)) else []

    def _end_sum(self, present: Sequence[_Child], verdict: bytes) -> None:
        for child in present:
            if verdict:
                child.channel.post(Letter.TOTAL, verdict)
            child.channel.post(Letter.CHUNK)
        waits = [(child.rank, max(0.0, child.completed_s - self._requested_s)) for child in present]
        self._rank.post(Letter.TOTAL, join_parts([verdict, encode_value(waits)]))
        self._begin_vector(0 if verdict[:1] == b"\1" else (self._number + 1) % len(self._chunks))
        self._end_request()

    # Values, traffic, and the end

    def _deliver_values(self, present: Sequence[_Child], joined: bytes | bytearray) -> None:
        for channel in (self._rank, *(child.channel for child in present)):
            channel.post(Letter.VALUES, joined)
        self._end_request()

    def _void(self, present: Sequence[_Child], verdict: bytes) -> None:
        for child in present:
            child.channel.post(Letter.VOID, verdict)
            child.num_voided += 1
        self._values.clear()
        self._begin_vector(0)
        self._rank.post(Letter.VOID, verdict)
        self._end_request()

    def _count_traffic(self, present: Sequence[_Child]) -> bool:
        """Send the rank the bytes that each link has sent and received, once all links have reported."""
        if any(child.traffic is None for child in present):
            return False
        counted = [[child.rank, *(child.traffic or ())] for child in present]
        self._rank.post(Letter.TRAFFIC, encode_value(counted))
        self._end_request()
        return True

    def _close(self) -> None:
        for channel in (self._rank, *(child.channel for child in self._children.values())):
            channel.post(Letter.CLOSE)
        self._end_request()


def run_hub(descriptor: int) -> int:
    """Serve the rank at the other end of a socket, until it ends."""
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(LinkLostError):
        local, total = channel.receive_descriptors(2)
        _, content = channel.receive()
        settings = from_json(HubSettings, content.decode())
        hub = Hub(channel, settings, local, total)
        if settings.rank:
            hub.await_parent()
        channel.send(Letter.OPEN)
        hub.serve()
    return 0
