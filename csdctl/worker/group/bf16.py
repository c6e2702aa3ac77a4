"""Vectors on the wire: their gradients as bfloat16, with half the bytes, and the rest as float32.

bfloat16 is the upper half of a float32: the same range, and 8 bits of precision. Ranks add in float32. A rank
rounds its own gradients once, and rank 0 rounds their sum once, to the nearest, ties to even.
"""

from collections.abc import Iterable

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.group.chunks import Chunk

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


def read_chunk(vector: Array, chunk: Chunk) -> Array:
    """Return a chunk of a vector on the wire as float32."""
    on_wire = vector[chunk.wire]
    return from_bf16(on_wire.view(np.uint16)) if chunk.is_halved else on_wire


def write_chunk(vector: Array, values: Array, chunk: Chunk) -> None:
    """Write float32 `values` as a chunk of a vector on the wire."""
    if chunk.is_halved:
        to_bf16(values, vector[chunk.wire].view(np.uint16))
    else:
        vector[chunk.wire] = values


def pack(vector: Array, chunks: Iterable[Chunk]) -> None:
    """Bring the halved ones of `chunks` of a float32 vector into the form of the wire, in place."""
    for chunk in chunks:
        if chunk.is_halved:
            write_chunk(vector, vector[chunk.elements], chunk)


def unpack(received: Array, chunks: Iterable[Chunk], into: Array) -> Array:
    """Write `chunks` of the vector on the wire as float32 to `into`, and return it."""
    for chunk in chunks:
        into[chunk.elements] = read_chunk(received, chunk)
    return into
