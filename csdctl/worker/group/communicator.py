"""The interface to the other ranks of a group, and its implementation for a single rank."""

from typing import Any, Protocol

from csdctl.worker.data.arrays import Array
from csdctl.worker.group.tails import ExpectedTails
from csdctl.worker.group.values import Check, T, decode_values, encode_value
from csdctl.worker.protocol.events import SentBytes


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
