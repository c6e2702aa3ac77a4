"""What a rank needs of the other ranks, and a rank that has none."""

from typing import Any, Protocol

from csdctl.worker.data.arrays import Array
from csdctl.worker.protocol.events import SentBytes


class Communicator(Protocol):
    """The ranks of one group; `rank` counts within it."""

    rank: int
    size: int
    collective: str
    sum_s: float

    @property
    def local(self) -> Array:
        """Where this rank's vector is best written; shape (n,), float32."""

    def sum(self, vector: Array) -> Array:
        """The sum of `vector` over all ranks, on all ranks, to the same bit; valid until the next call."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (as JSON knows it), in order of rank, on all ranks."""

    def send(self, rank: int, content: Any, what: str) -> None:
        """Send bytes to one rank, which must `receive` them from this one; `what` they are is counted."""

    def receive(self, rank: int) -> bytes | bytearray:
        """The bytes that `rank` sends."""

    def traffic(self) -> list[SentBytes]:
        """What the ranks have sent to each other since they met, asked by all of them together."""

    def close(self) -> None:
        """Part from the others, all together."""

    def drop(self) -> None:
        """Leave at once."""

    def interrupt(self) -> None:
        """From another thread: whoever waits here for the others gets a LinkLostError."""


class SoloCommunicator:
    """The only rank: there is nobody to wait for."""

    rank, size = 0, 1
    collective, sum_s = "none", 0.0

    def __init__(self, local: Array) -> None:
        self.local = local

    def sum(self, vector: Array) -> Array:
        """`vector` itself."""
        return vector

    def gather(self, value: Any) -> list[Any]:
        """`value` alone."""
        return [value]

    def send(self, rank: int, content: Any, what: str) -> None:
        """There is nobody: raises ValueError."""
        raise ValueError("there is no other rank")

    def receive(self, rank: int) -> bytes:
        """There is nobody: raises ValueError."""
        raise ValueError("there is no other rank")

    def traffic(self) -> list[SentBytes]:
        """Nothing was sent."""
        return []

    def close(self) -> None:
        """Nothing."""

    def drop(self) -> None:
        """Nothing."""

    def interrupt(self) -> None:
        """Nothing."""
