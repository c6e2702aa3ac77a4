"""The interface of a rank to the other ranks of its run: through its link, through its hub, or alone.

Every operation of several ranks ends with a verdict, which is the same on all of them. It names the ranks
that took part, and the ranks of the next operation. So all ranks learn of a loss, or of a rank that has
joined, at the same point.
"""

import contextlib
import select
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from csdctl.worker.data.arrays import Array
from csdctl.worker.group import bf16
from csdctl.worker.group.channel import (
    MAX_VALUES_BYTES,
    NUMBER,
    POLL_S,
    Channel,
    Letter,
    LinkSettings,
    Listener,
    join_parts,
    split_parts,
)
from csdctl.worker.group.chunks import SumSizes, divide
from csdctl.worker.group.hub import WAITING_INTERVAL_S, HubSettings, Lost, Verdict
from csdctl.worker.group.shared_memory import share_vector
from csdctl.worker.group.values import (
    MAX_REASON,
    LinkLostError,
    PeerFaultError,
    RankLostError,
    StepVoidError,
    decode_value,
    encode_value,
)
from csdctl.worker.protocol.events import STATE, SUMS, SentBytes
from csdctl.worker.protocol.json_codec import Count, RankNumber, from_json, to_json

NUM_KEPT = 2
"""Rank 0 buffers at most this many messages of the largest size from each rank."""
SENT_BYTES = tuple[tuple[RankNumber, Count, Count], ...]
"""For each rank behind a hub, the bytes that the hub received from it and sent to it."""


class Communicator:
    """The ranks that work together. A rank is alone until `connect`. Calls raise LinkLostError."""

    has_hub = False

    def __init__(
        self,
        rank: int,
        sizes: SumSizes,
        max_bytes: int = 0,
        on_waiting: Callable[[list[int]], object] = list,
        address: str = "",
    ) -> None:
        """`sizes`: of a step's sums. `on_waiting` gets the ranks that this rank waits for.

        `address`: where the rank awaits its link, '' without a link.
        """
        self.rank, self._sizes = rank, sizes
        self.max_bytes, self._on_waiting = max_bytes, on_waiting
        self.members: tuple[int, ...] = (rank,)
        """The ranks of the next operation, in order."""
        self.counted: tuple[int, ...] = (rank,)
        """The ranks whose vectors or values are in the result of the latest operation."""
        self.local, *descriptors = share_vector(max(size for size, _ in sizes))
        """The buffer for this rank's vector: float32, as long as the largest sum. `sum` copies others."""
        self._total, self._descriptors = self.local, descriptors
        if address or self.has_hub:
            self._total, descriptor = share_vector(len(self.local))
            self._descriptors.append(descriptor)
        self.waits: list[tuple[int, float]] = []
        """On a hub's rank: each rank that a sum has waited for, and the seconds. The task clears it."""
        self.lost: list[tuple[int, str, bool]] = []
        """On rank 0: ranks that were lost, why, and whether it was their fault. The task clears it."""
        self.joining: dict[int, str] = {}
        """On rank 0: ranks that wait for their turn, with the hash of their state."""
        self.admitted: set[int] = set()
        """On rank 0: ranks that were admitted and need the state. The task clears it."""
        has_halves = rank > 0 and any(num_halved for _, num_halved in sizes)
        self._chunks = [divide(*size) if has_halves else [] for size in sizes]
        """For each sum, the chunks that arrive as bfloat16. None on rank 0, which has float32."""
        self._unpacked = self.local.copy() if has_halves else self._total
        self._number = 0
        self._listener = Listener(address, rank) if address else None
        self._channel: Channel | None = None
        self._messages: Counter[tuple[str, int, int]] = Counter()
        """Bytes of messages between this rank and another so far, by traffic class, sender and receiver."""
        self._arrived: dict[int, list[bytearray]] = {}
        """Bytes by sender that `receive` has not returned yet."""
        self._gone: set[int] = set()
        """On rank 0: members that have been lost since the latest verdict."""

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part."""
        return len(self.members) == 1

    def connect(self, check: Callable[[], object]) -> None:
        """Wait for the link to rank 0. `check` is called now and then, and may raise an error."""
        assert self._listener
        settings = LinkSettings(self._sizes, self.max_bytes + MAX_VALUES_BYTES)
        self._open(self._listener.await_link(check), to_json(settings))

    def _open(self, channel: Channel, settings: str) -> None:
        channel.max_bytes = self.max_bytes + MAX_VALUES_BYTES
        channel.send_descriptors(*self._descriptors)
        channel.send(Letter.OPEN, settings.encode())
        self._channel, self._number = channel, 0
        self._arrived.clear()

    def join(self, state_hash: str) -> None:
        """Tell rank 0 that this rank is ready, and what state it has."""
        self._send(Letter.JOIN, NUMBER.pack(self.rank) + state_hash.encode())

    def sum(
        self, vector: Array, counts: Mapping[int, float] | None = None, *, checks_finite: bool = False
    ) -> Array:
        """Return the sum of `vector` over all ranks, bit-identical on all. Valid until the next call.

        The vector is as long as the largest sum of a step. Only the elements of the current sum are sent.
        `counts`: the required n of each rank. `checks_finite`: whether a vector that is not finite is left
        out. Only ranks with a hub use both. Raises StepVoidError if the step must be repeated.
        """
        if not self._channel:
            self.counted = self.members
            return vector
        if vector is not self.local:
            self.local[:] = vector
        chunks, head = self._chunks[self._number], b""
        if not self.has_hub:
            bf16.pack(self.local, chunks)
        else:
            head = encode_value([checks_finite, list((counts or {}).items())])
        self._send(Letter.VECTOR, head)
        verdict: bytes | bytearray = self._await(Letter.TOTAL)
        if self.has_hub:
            verdict, waits = split_parts(verdict)
            rows = decode_value(tuple[tuple[RankNumber, float], ...], waits)
            self.waits += [(rank, wait_s) for rank, wait_s in rows if wait_s > 0]
        self._apply(verdict[1:])
        if verdict[:1] == b"\1":
            self._number = 0
            raise StepVoidError
        self._number = (self._number + 1) % len(self._sizes)
        return bf16.unpack(self._total, chunks, self._unpacked) if chunks else self._total

    def gather(self, value: Any, hint: Any) -> dict[int, Any]:
        """Return the JSON `value` of every rank that is present. A rank that sends another type is lost.

        `hint`: the annotation of the type.
        """
        contents, values = {self.rank: encode_value(value)}, {}
        if not self._channel:
            self.counted = self.members
        else:
            self._send(Letter.VALUE, NUMBER.pack(self.rank) + contents[self.rank])
            verdict, *parts = split_parts(self._await(Letter.VALUES))
            self._apply(verdict)
            contents = dict(zip(self.counted, parts, strict=True))
        for rank, content in contents.items():
            try:
                values[rank] = decode_value(hint, content)
            except ValueError as error:
                self.evict(rank, f"sent an invalid value: {error}")
        self.counted = tuple(values)
        return values

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        """Send bytes to a rank, which must `receive` them. One of the two ranks is rank 0."""
        packed = memoryview(content).cast("B")
        self._messages[traffic_class, self.rank, rank] += len(packed)
        self._send(Letter.DATA, NUMBER.pack(self.rank or rank) + packed)

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        """Return the bytes that `rank` sends. Raises PeerFaultError, RankLostError, StepVoidError."""
        self.look()
        while not self._arrived.get(rank):
            if rank in self._gone:
                raise RankLostError(rank)
            is_ready = select.select([self._linked], [], [], WAITING_INTERVAL_S)[0]
            if self.has_hub and not is_ready:
                self._on_waiting([rank])
            self.look()
        content = self._arrived[rank].pop(0)
        if len(content) > max_bytes:
            raise PeerFaultError(rank, f"sent {len(content)} bytes, expected at most {max_bytes}")
        self._messages[traffic_class, rank, self.rank] += len(content)
        return content

    def give_state(self, rank: int, packed: bytes) -> None:
        """Send the members and the state from rank 0 to an admitted rank. b'' if it has the same state."""
        self.send(rank, join_parts([encode_value(self.members), packed]), STATE)

    def take_state(self) -> bytes:
        """Return the state from rank 0 after `join`, b'' if this rank has the same."""
        members, packed = split_parts(self.receive(0, self.max_bytes, STATE))
        self.members = decode_value(tuple[RankNumber, ...], bytearray(members))
        return packed

    def admit(self, ranks: Collection[int]) -> None:
        """Admit ranks, on rank 0, from the end of the next operation on."""
        if ranks:
            self._send(Letter.ADMIT, encode_value(sorted(ranks)))
            self.admitted |= set(ranks)
            for rank in ranks:
                self.joining.pop(rank, None)

    def evict(self, rank: int, reason: str) -> None:
        """Exclude, on rank 0, a rank that has violated the protocol. On other ranks, do nothing."""
        if self.rank == 0 and rank:
            self._send(Letter.NOTE, encode_value([[rank, reason[:MAX_REASON], True]]))

    def give_up_step(self) -> None:
        """Make all ranks repeat the step. Raises StepVoidError. Only on rank 0."""
        if not self._channel:
            raise StepVoidError
        self._send(Letter.VOID)
        self._await(Letter.TOTAL)

    def await_joining(self) -> None:
        """Wait, on rank 0, until another rank joins or is lost, or something else arrives."""
        self._take(*self._linked.receive())

    def look(self) -> None:
        """Note, on rank 0, ranks that join or are lost, without waiting."""
        for letter, content in self._channel.take() if self._channel else ():
            self._take(letter, content)

    def traffic(self) -> list[SentBytes]:
        """Return the bytes between a hub's rank and the ranks behind it, without lost links."""
        if not self.has_hub:
            return []
        self._send(Letter.TRAFFIC)
        rows = []
        for rank, num_received, num_sent in decode_value(SENT_BYTES, self._await(Letter.TRAFFIC)):
            for sender, receiver, num_bytes in ((rank, self.rank, num_sent), (self.rank, rank, num_received)):
                counts = {key[0]: n for key, n in self._messages.items() if key[1:] == (sender, receiver)}
                counts[SUMS] = num_bytes - sum(counts.values())
                rows += [SentBytes(name, sender, receiver, n) for name, n in counts.items() if n > 0]
        return rows

    def close(self) -> None:
        """Leave, all ranks together."""
        if self._channel:
            with contextlib.suppress(LinkLostError):
                self._send(Letter.CLOSE, NUMBER.pack(self.rank))
                self._await(Letter.CLOSE)
            self._channel.close()

    def disconnect(self) -> None:
        """Leave at once: the link or the hub ends."""
        self._linked.close()

    @property
    def _linked(self) -> Channel:
        if not self._channel:
            raise LinkLostError
        return self._channel

    def _send(self, letter: bytes, content: bytes = b"") -> None:
        self._linked.send(letter, content)

    def _await(self, letter: bytes) -> bytearray:
        """Return the content of the next message with this letter. Process messages before it."""
        while True:
            received, content = self._linked.receive()
            if received == letter:
                return content
            self._take(received, content)

    def _take(self, letter: bytes, content: bytearray) -> None:
        if letter == Letter.DATA:
            (rank,) = NUMBER.unpack_from(content)
            self._keep(0 if self.rank else rank, content[NUMBER.size :])
        elif letter == Letter.VOID:
            self._arrived.clear()
            self._number = 0
            self._apply(content)
            self._send(Letter.VOIDED, NUMBER.pack(self.rank))
            raise StepVoidError
        elif letter == Letter.WAITING:
            self._on_waiting(list(decode_value(tuple[RankNumber, ...], content)))
        elif letter == Letter.JOIN:
            (rank,) = NUMBER.unpack_from(content)
            self.joining[rank] = content[NUMBER.size :].decode(errors="replace")
        elif letter == Letter.NOTE:
            self._note_losses(decode_value(Lost, content))
        else:
            raise LinkLostError

    def _keep(self, rank: int, content: bytearray) -> None:
        """Keep bytes of a rank until they are received. A rank that sends too many is lost."""
        kept = self._arrived.setdefault(rank, [])
        if self.rank == 0 and sum(map(len, kept)) > NUM_KEPT * self.max_bytes:
            self.evict(rank, "sent more bytes than were asked for")
        else:
            kept.append(content)

    def _note_losses(self, lost: Lost) -> None:
        for rank, reason, is_fault in lost:
            self.lost.append((rank, reason, is_fault))
            self.joining.pop(rank, None)
            self.admitted.discard(rank)
            self._arrived.pop(rank, None)
            self._gone.add(rank)
            # Its next link counts bytes from 0.
            for key in [key for key in self._messages if rank in key[1:]]:
                del self._messages[key]

    def _apply(self, verdict: bytes | bytearray) -> None:
        self._gone.clear()
        self.counted = self.members
        if verdict:
            decided = from_json(Verdict, bytes(verdict).decode())
            self.members, self.counted = decided.members, decided.counted


class HubProcess:
    """The process of a hub, which ends with this one. It starts while this rank loads its model."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command`: the command line of a hub, without the descriptor of its socket, which comes last."""
        self.command = command
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self.process = subprocess.Popen(
                [*command, str(descriptor)], pass_fds=[descriptor], stdin=subprocess.DEVNULL
            )
        self.channel = Channel(ours)


class HubCommunicator(Communicator):
    """The communicator of a rank with ranks behind it: rank 0, or the rank of a server."""

    has_hub = True

    def __init__(
        self, hub: HubProcess, settings: HubSettings, on_waiting: Callable[[list[int]], None]
    ) -> None:
        """Return when links can connect to the hub. Raises LinkLostError."""
        super().__init__(settings.rank, settings.sizes, settings.max_bytes, on_waiting)
        self._settings = settings
        self._start(hub)

    def _start(self, hub: HubProcess) -> None:
        self._hub, self._is_used = hub, False
        self._open(hub.channel, to_json(self._settings))
        self._await(Letter.OPEN)

    def connect(self, check: Callable[[], object]) -> None:
        """Wait, on a server, until its hub has a link to rank 0. A hub that had a link before is replaced."""
        if self._is_used:
            self.disconnect()
            self._start(HubProcess(self._hub.command))
        self._is_used = True
        while not select.select([self._linked], [], [], POLL_S)[0]:
            check()
        self._await(Letter.OPEN)

    def disconnect(self) -> None:
        """End the hub."""
        super().disconnect()
        self._hub.process.wait()  # it ends when its channel is closed
