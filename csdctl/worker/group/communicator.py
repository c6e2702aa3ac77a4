"""The interface to the other ranks of a group, and its implementations: for one rank, and by a link.

A link takes in what other machines send, so its answers are not trusted either: their size is limited, and
their content is checked.
"""

import contextlib
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from csdctl.worker.data.arrays import Array
from csdctl.worker.group.channel import (
    ALLGATHER,
    CHOOSE,
    CLOSE,
    CONNECTIONS,
    DONE,
    EXPECT,
    FAULT,
    NOT_FINITE,
    RECEIVE,
    SEND,
    SEND_HEAD,
    SUM,
    WAITING,
    Channel,
    LinkGreeting,
    SharedVectors,
)
from csdctl.worker.group.messages import MAX_VALUE_BYTES, split_parts
from csdctl.worker.group.traffic import gather_traffic
from csdctl.worker.group.values import (
    Check,
    ExpectedTails,
    LinkLostError,
    PeerFaultError,
    T,
    as_count,
    decode_value,
    decode_values,
    encode_value,
)
from csdctl.worker.protocol.events import SentBytes
from csdctl.worker.protocol.orders import COLLECTIVE_NAMES


class Communicator(Protocol):
    """The ranks of one group; `rank` counts within it.

    Every call that needs the others raises LinkLostError when the group is lost, and its subclass
    PeerFaultError when another rank has sent what no rank may send.
    """

    rank: int
    size: int
    collective: str
    sum_s: float
    """Seconds of one sum, as measured when the group was formed."""

    @property
    def local(self) -> Array:
        """The buffer where this rank's vector is best written; shape (n,), float32."""

    def sum(self, vector: Array, expected: ExpectedTails | None = None) -> Array:
        """Return the sum of `vector` over all ranks, bit-identical on all; valid until the next call.

        `expected`, on rank 0: what the ranks' vectors must end with.
        """

    def find_not_finite(self) -> list[int]:
        """Return the other ranks whose latest vectors are not finite, on rank 0; [] where that is unknown."""

    def allgather(self, value: Any, check: Check[T]) -> list[T]:
        """Return every rank's `value` (JSON), in order of rank, on all ranks.

        `check` returns a received value as it may be used, and raises ValueError or TypeError for any other:
        that is its rank's fault.
        """

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        """Send bytes to one rank, which must `receive` them; counted as traffic of `traffic_class`."""

    def post(self, rank: int, content: Any, traffic_class: str) -> None:
        """Send without waiting until the bytes have left: they take memory of their own until then."""

    def expect(self, rank: int, max_bytes: int) -> None:
        """Let the next bytes that `rank` sends arrive before they are received, with the same `max_bytes`."""

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytes | bytearray:
        """Return the bytes that `rank` sends, at most `max_bytes`; counted as traffic of `traffic_class`."""

    def traffic(self) -> list[SentBytes]:
        """Return what the ranks have sent to each other since they joined; call on all ranks."""

    def close(self) -> None:
        """Leave the group, all ranks together."""

    def disconnect(self) -> None:
        """Leave at once."""

    def interrupt(self) -> None:
        """From another thread: make the call that waits for other ranks raise LinkLostError."""


class SoloCommunicator:
    """The only rank of its group."""

    rank, size = 0, 1
    collective, sum_s = "none", 0.0

    def __init__(self, local: Array) -> None:
        self.local = local

    def sum(self, vector: Array, expected: ExpectedTails | None = None) -> Array:
        """Return `vector` itself."""
        return vector

    def find_not_finite(self) -> list[int]:
        """Return nothing: there is no other rank."""
        return []

    def allgather(self, value: Any, check: Check[T]) -> list[T]:
        """Return `value` alone."""
        return decode_values([encode_value(value)], check)

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        """Raise ValueError: there is no other rank."""
        raise ValueError("there is no other rank")

    def post(self, rank: int, content: Any, traffic_class: str) -> None:
        """Raise ValueError: there is no other rank."""
        raise ValueError("there is no other rank")

    def expect(self, rank: int, max_bytes: int) -> None:
        """Raise ValueError: there is no other rank."""
        raise ValueError("there is no other rank")

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytes:
        """Raise ValueError: there is no other rank."""
        raise ValueError("there is no other rank")

    def traffic(self) -> list[SentBytes]:
        """Return nothing: nothing was sent."""
        return []

    def close(self) -> None:
        """Do nothing."""

    def disconnect(self) -> None:
        """Do nothing."""

    def interrupt(self) -> None:
        """Do nothing."""


MAX_FAULT_CHARACTERS = 300


class LinkCommunicator:
    """Implements `Communicator`."""

    def __init__(
        self,
        channel: Channel,
        greeting: LinkGreeting,
        vectors: SharedVectors,
        on_waiting: Callable[[list[int]], None],
    ) -> None:
        """`on_waiting` gets the ranks that a sum has been waiting for, every few seconds."""
        self.rank, self.size = greeting.rank, greeting.size
        self._channel = channel
        self._vectors = vectors
        self._on_waiting = on_waiting
        self.collective, self.sum_s = "", 0.0
        self._messages: Counter[tuple[str, int, int]] = Counter()
        """Bytes of messages between this rank and another so far, by traffic class, sender and receiver."""
        channel.send_descriptor(vectors.descriptor)

    def choose_collective(self, wanted: str) -> None:
        """Choose the collective, on all ranks together; `wanted` names one instead of measuring."""
        answer = self._parse(self._request(CHOOSE, wanted.encode()), _as_choice)
        self.collective, self.sum_s = answer

    @property
    def local(self) -> Any:
        """The buffer where this rank's vector is best written; shape (n,), float32."""
        return self._vectors.local

    def sum(self, vector: Any, expected: ExpectedTails | None = None) -> Any:
        """Return the sum of `vector` over all ranks, bit-identical on all; valid until the next call.

        `expected`, on rank 0: what the vectors must end with.
        """
        if vector is not self._vectors.local:
            self._vectors.local[:] = vector
        self._request(SUM, expected.pack() if expected else b"")
        return self._vectors.total

    def find_not_finite(self) -> list[int]:
        """Return the ranks of the group whose latest vectors are not finite, on rank 0, where it is known."""
        return self._parse(self._request(NOT_FINITE), self._as_ranks)

    def allgather(self, value: Any, check: Check[T]) -> list[T]:
        """Return every rank's `value` (JSON), in order of rank, on all ranks.

        `check` returns a received value as it may be used, and raises ValueError or TypeError; the value then
        is its rank's fault: PeerFaultError.
        """
        joined = self._request(ALLGATHER, encode_value(value), 2 * self.size * MAX_VALUE_BYTES)
        try:
            contents = split_parts(joined, self.size)
        except ValueError:
            raise LinkLostError from None
        return decode_values(contents, check)

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        """Send bytes to one rank, which must `receive` them; counted as traffic of `traffic_class`."""
        self._send(rank, content, traffic_class, is_waiting=True)

    def post(self, rank: int, content: Any, traffic_class: str) -> None:
        """Send without waiting until the bytes have left: they take memory of the link until then."""
        self._send(rank, content, traffic_class, is_waiting=False)

    def expect(self, rank: int, max_bytes: int) -> None:
        """Let the next bytes that `rank` sends arrive before they are received, with the same `max_bytes`."""
        self._request(EXPECT, struct.pack("<qq", rank, max_bytes))

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        """Return the bytes that `rank` sends; raises PeerFaultError when they are more than `max_bytes`."""
        received = self._request(RECEIVE, struct.pack("<qq", rank, max_bytes), max_bytes)
        self._messages[traffic_class, rank, self.rank] += len(received)
        return received

    def traffic(self) -> list[SentBytes]:
        """Return what the ranks have sent to each other since they joined; call on all ranks."""
        messages = [(*key, count) for key, count in self._messages.items()]
        connections = self._parse(self._request(CONNECTIONS, max_bytes=MAX_VALUE_BYTES), _as_list)
        return gather_traffic(self.allgather, messages, connections)

    def close(self) -> None:
        """Leave MPI, together with all other ranks; the link ends."""
        with contextlib.suppress(LinkLostError):
            self._request(CLOSE)
        self._channel.close()

    def disconnect(self) -> None:
        """Drop a link that is of no more use; it ends when its channel closes."""
        self._channel.close()

    def interrupt(self) -> None:
        """From another thread: make the call that waits for the link raise LinkLostError."""
        self._channel.shut()

    def _send(self, rank: int, content: Any, traffic_class: str, *, is_waiting: bool) -> None:
        packed = memoryview(content).cast("B").tobytes()
        self._messages[traffic_class, self.rank, rank] += len(packed)
        self._request(SEND, SEND_HEAD.pack(rank, is_waiting) + packed)

    def _request(self, letter: bytes, content: bytes = b"", max_bytes: int = 0) -> bytearray:
        self._channel.send(letter, content)
        while True:
            letter, answer = self._channel.receive(max_bytes)
            if letter == DONE:
                return answer
            if letter == WAITING:
                self._on_waiting(self._parse(answer, self._as_ranks))
            elif letter == FAULT:
                raise self._parse(answer, self._as_fault)
            else:
                raise LinkLostError

    @staticmethod
    def _parse(answer: bytearray, check: Check[T]) -> T:
        """Return the checked answer; a link that answers anything else is as good as lost."""
        try:
            return check(decode_value(answer))
        except (ValueError, TypeError, LookupError):
            raise LinkLostError from None

    def _as_ranks(self, value: Any) -> list[int]:
        return [as_count(rank, self.size - 1) for rank in _as_list(value)]

    def _as_fault(self, value: Any) -> PeerFaultError:
        return PeerFaultError(
            as_count(value["rank"], self.size - 1), str(value["message"])[:MAX_FAULT_CHARACTERS]
        )


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value


def _as_choice(value: Any) -> tuple[str, float]:
    collective, sum_s = value["collective"], value["sum_s"]
    if collective not in COLLECTIVE_NAMES or not isinstance(sum_s, float):
        raise ValueError("expected a collective and its time")
    return collective, sum_s
