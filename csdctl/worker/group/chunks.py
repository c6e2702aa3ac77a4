"""The chunks of a vector: each is sent as one message, in the same order by all ranks."""

from dataclasses import dataclass
from typing import Annotated

from csdctl.worker.protocol.json_codec import Count, MaxLength

SumSizes = Annotated[tuple[tuple[Count, Count], ...], MaxLength(1 << 12)]
"""For each sum of a step, in order: its elements, and how many of them are sent as bfloat16."""
CHUNK_SIZE = 1 << 18
"""Elements of float32 that are sent as one message: 1 MiB, below mpirun's eager limit."""


@dataclass(frozen=True)
class Chunk:
    """A part of a vector that is sent as one message."""

    elements: slice
    is_halved: bool = False

    @property
    def wire(self) -> slice:
        """Its place in the vector on the wire: bfloat16 takes the first half of the elements."""
        start, stop = self.elements.start, self.elements.stop
        return slice(start, (start + stop) // 2) if self.is_halved else self.elements


def divide(size: int, num_halved: int = 0) -> list[Chunk]:
    """Return the chunks of a vector. The first `num_halved` elements, an even number, are bfloat16."""
    halved = range(0, num_halved, 2 * CHUNK_SIZE)
    unhalved = range(num_halved, size, CHUNK_SIZE)
    return [
        *(Chunk(slice(at, min(num_halved, at + halved.step)), is_halved=True) for at in halved),
        *(Chunk(slice(at, min(size, at + unhalved.step))) for at in unhalved),
    ]
