"""Vectors on the wire: their gradients as bfloat16, with half the bytes, and the rest as float32.

bfloat16 is the upper half of a float32: the same range, and 8 bits of precision. Ranks add in float32. A rank
rounds its own gradients once, and rank 0 rounds their sum once, to the nearest, ties to even.
"""

import numpy as np

from csdctl.worker.data.arrays import Array

_QUIET_NAN = 0x7FC0


def to_bf16(values: Array, out: Array) -> None:
    """Round float32 `values`, shape (n,), to bfloat16, as uint16 `out`, shape (n,), which may overlap."""
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    rounded[np.isnan(values)] = _QUIET_NAN  # rounding could carry into the sign
    out[:] = rounded


def from_bf16(halves: Array) -> Array:
    """Return uint16 `halves`, shape (n,), as float32."""
    widened: Array = (halves.astype(np.uint32) << 16).view(np.float32)
    return widened


class Wire:
    """One sum of a step: `num_halved` elements as bfloat16, then the others as float32."""

    def __init__(self, size: int, num_halved: int = 0) -> None:
        """`size`: elements of the vector; `num_halved`: an even number."""
        self.size, self.num_halved = size, num_halved
        self.saved = num_halved // 2
        """Elements of float32 by which the vector on the wire is shorter."""

    def pack(self, vector: Array) -> None:
        """Bring `vector`, shape (size,), float32, into the form of the wire, in place."""
        if self.saved:
            to_bf16(vector[: self.num_halved], vector.view(np.uint16)[: self.num_halved])
            vector[self.saved : self.size - self.saved] = vector[self.num_halved : self.size].copy()

    def unpack(self, received: Array, into: Array) -> Array:
        """Return the vector on the wire as float32; in `into` unless it is so already."""
        if not self.saved:
            return received
        into[: self.num_halved] = from_bf16(received.view(np.uint16)[: self.num_halved])
        into[self.num_halved : self.size] = received[self.saved : self.size - self.saved]
        return into
