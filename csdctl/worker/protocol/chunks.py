"""The chunks of a vector: each is sent as one message, in the same order by all ranks.

Gradients stand at the start of a vector, and a backward pass computes those of the last layers first. So
their chunks are sent in reverse order, before the rest of the vector, which is known when all is computed.
"""

from dataclasses import dataclass

CHUNK_SIZE = 1 << 18
"""Elements of float32 that are sent as one message: 1 MiB, below mpirun's eager limit."""
OVERLAP_S = 0.05
"""Sums that take less are not overlapped with the computation: each chunk would wake a computing machine."""


@dataclass(frozen=True)
class Chunk:
    """A part of a vector that is sent as one message."""

    elements: slice
    """Its place in the vector."""
    is_halved: bool = False
    """Whether it is sent as bfloat16."""

    @property
    def wire(self) -> slice:
        """Its place in the vector on the wire: bfloat16 takes the first half of the elements."""
        start, stop = self.elements.start, self.elements.stop
        return slice(start, (start + stop) // 2) if self.is_halved else self.elements


def divide(size: int, num_early: int = 0, *, is_halved: bool = False) -> list[Chunk]:
    """Return the chunks of a vector of `size` elements, in the order in which they are sent.

    `num_early`: gradients, at the start, that are sent before the rest; `is_halved`: as bfloat16, an even
    number of them.
    """
    return divide_early(num_early, is_halved=is_halved) + _divide(num_early, size, CHUNK_SIZE)


def divide_early(num_early: int, *, is_halved: bool) -> list[Chunk]:
    """Return the chunks of those gradients alone."""
    return _divide(0, num_early, CHUNK_SIZE << is_halved, is_halved=is_halved)[::-1]


def count_early(num_gradients: int, *, is_halved: bool) -> int:
    """Return how many gradients are sent before the rest of a vector; none of those below one message."""
    return num_gradients // 2 * 2 if is_halved else num_gradients * (num_gradients >= CHUNK_SIZE)


def _divide(start: int, stop: int, step: int, *, is_halved: bool = False) -> list[Chunk]:
    return [Chunk(slice(at, min(stop, at + step)), is_halved) for at in range(start, stop, step)]
