"""The interface to the other ranks of a group, and its implementation for a single rank."""

from typing import Any, Protocol

from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.events import SentBytes


class Communicator(Protocol):
    """The ranks of one group; `rank` counts within it."""

    rank: int
    size: int
    collective: str
    sum_s: float
    """Seconds of one sum, as measured when the group was formed."""

    @property
    def local(self) -> Array:
        """The buffer where this rank's vector is best written; shape (n,), float32."""

    def sum(self, vector: Array) -> Array:
        """Return the sum of `vector` over all ranks, bit-identical on all; valid until the next call."""

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON), in order of rank, on all ranks."""

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        """Send bytes to one rank, which must `receive` them; counted as traffic of `traffic_class`."""

    def receive(self, rank: int) -> bytes | bytearray:
        """Return the bytes that `rank` sends."""

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

    def sum(self, vector: Array) -> Array:
        """Return `vector` itself."""
        return vector

    def allgather(self, value: Any) -> list[Any]:
        """Return `value` alone."""
        return [value]

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        """Raise ValueError: there is no other rank."""
        raise ValueError("there is no other rank")

    def receive(self, rank: int) -> bytes:
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
