"""The state of a training, from which a run resumes bit by bit: variables and `Position`.

`pack` turns both into one array of bytes, for files (state_files.py) and for other ranks.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.schedule import Segment
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.bounds import Measured
from csdctl.worker.protocol.json_codec import SCHEMA, ProtocolError, from_json, to_json

_HEAD = struct.Struct("<QQ")
"""Bytes of the position's JSON, and of all."""
MAX_POSITION_BYTES = 1 << 20
"""Space reserved for a position: dozens of bytes for every rank and every reassigned span."""


@dataclass(frozen=True)
class EpochTotals:
    """Sums over the steps of the epoch so far and over all ranks."""

    steps: int = 0
    samples: int = 0
    loss: Measured = 0.0
    metrics: tuple[Measured, ...] = ()
    weight: float = 0.0
    """The sum of the samples' weights: their number when all weights are 1."""


@dataclass(frozen=True)
class CallbackState:
    """The state of early stopping and of reduce on plateau."""

    best: Measured | None = None
    best_epoch: int = 0
    epochs_without_gain: int = 0
    plateau_best: Measured | None = None
    epochs_on_plateau: int = 0
    rate_factor: float = 1.0
    is_stopping: bool = False


@dataclass(frozen=True)
class Position:
    """The progress of a run, and the division of the rest of the epoch among the ranks."""

    epoch: int
    """The epoch being trained, from 1."""
    step: int
    """Steps done in this epoch."""
    total_steps: int
    """Steps done in the run."""
    segment: Segment | None
    """None between epochs."""
    batch_sizes: dict[str, int]
    """Of every rank that took part at any time, by its number."""
    totals: EpochTotals = EpochTotals()
    callbacks: CallbackState = CallbackState()
    schema: int = SCHEMA


def pack(variables: list[Any], position: Position, out: Array | None = None) -> Array:
    """Return variables and position as one array of bytes, uint8; at the start of `out` when given."""
    arrays = [np.ascontiguousarray(np.asarray(variable.value)) for variable in variables]
    text = to_json(position).encode()
    size = _HEAD.size + len(text) + sum(array.nbytes for array in arrays)
    packed = np.empty(size, np.uint8) if out is None else out[:size]
    if len(packed) < size:
        raise WorkerError(f"the state has {size} bytes, the buffer only {len(packed)}")
    packed[: _HEAD.size] = np.frombuffer(_HEAD.pack(len(text), size), np.uint8)
    place = _HEAD.size + len(text)
    packed[_HEAD.size : place] = np.frombuffer(text, np.uint8)
    for array in arrays:
        packed[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
        place += array.nbytes
    return packed


def unpack(packed: Array, variables: list[Any]) -> Position:
    """Set `variables` from what `pack` returned; raises WorkerError when it does not match them."""
    length, total = _HEAD.unpack(packed[: _HEAD.size].tobytes())
    place = _HEAD.size + length
    arrays = [np.asarray(variable.value) for variable in variables]
    expected = place + sum(array.nbytes for array in arrays)
    if not total == expected == len(packed):
        raise WorkerError(
            f"the saved state has {len(packed)} bytes, expected {expected} for this model",
            remedy="the model or the optimizer has changed since; start a new run",
        )
    for variable, array in zip(variables, arrays, strict=True):
        chunk = packed[place : place + array.nbytes].copy().view(array.dtype).reshape(array.shape)
        variable.assign(chunk)
        place += array.nbytes
    return position_of(packed)


def position_of(packed: Array) -> Position:
    """Return the position alone; raises WorkerError when it cannot be read."""
    length, _ = _HEAD.unpack(packed[: _HEAD.size].tobytes())
    try:
        return from_json(Position, packed[_HEAD.size : _HEAD.size + length].tobytes().decode())
    except ProtocolError as error:
        raise WorkerError(f"the saved state cannot be read: {error}", remedy="start a new run") from None
