"""The state of a training: what a run goes on from, bit by bit.

The variables that training changes, and the `Position`. Three homes: the step file (memory of the machine,
after every step, survives the process), a checkpoint (disk, synced, survives the machine), and the other
ranks (survive this one); for the way between them, one array of bytes.
"""

import contextlib
import json
import mmap
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.schedule import Segment
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import sync_directory
from csdctl.worker.protocol.json_codec import ProtocolError, from_json, to_json

STATE_SCHEMA = 1
_HEAD = struct.Struct("<QQ")
"""Bytes of the position's JSON, and of all."""
POSITION_ROOM_BYTES = 1 << 20
"""Room for a position: some dozens of bytes for every rank and every piece lent."""


@dataclass(frozen=True)
class EpochTotals:
    """Sums over the steps of the epoch so far, of all ranks."""

    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    metrics: tuple[float, ...] = ()
    weight: float = 0.0
    """The sum of the samples' weights; their number when all are 1."""


@dataclass(frozen=True)
class CallbackState:
    """What the callbacks remember: early stopping and reduce on plateau."""

    best: float | None = None
    best_epoch: int = 0
    epochs_without_gain: int = 0
    plateau_best: float | None = None
    epochs_on_plateau: int = 0
    rate_factor: float = 1.0
    is_stopping: bool = False


@dataclass(frozen=True)
class Position:
    """How far a run has come: after how many steps, and what the rest of the epoch looks like."""

    epoch: int
    """From 1; the one being trained."""
    step: int
    """Steps done in it."""
    total_steps: int
    """Steps done in the run."""
    leg: Segment | None
    """None between epochs."""
    batch_sizes: dict[str, int]
    """Of every rank that ever took part, by its number."""
    tallied: EpochTotals = EpochTotals()
    progressed: CallbackState = CallbackState()
    schema: int = STATE_SCHEMA


def pack(variables: list[Any], position: Position, out: Array | None = None) -> Array:
    """Variables and position as one array of bytes, uint8; at the beginning of `out` when given."""
    arrays = [np.ascontiguousarray(np.asarray(variable.value)) for variable in variables]
    text = to_json(position).encode()
    size = _HEAD.size + len(text) + sum(array.nbytes for array in arrays)
    packed = np.empty(size, np.uint8) if out is None else out[:size]
    if len(packed) < size:
        raise WorkerError(f"a state of {size} bytes does not fit into {len(packed)}")
    packed[: _HEAD.size] = np.frombuffer(_HEAD.pack(len(text), size), np.uint8)
    place = _HEAD.size + len(text)
    packed[_HEAD.size : place] = np.frombuffer(text, np.uint8)
    for array in arrays:
        packed[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
        place += array.nbytes
    return packed


def unpack(packed: Array, variables: list[Any]) -> Position:
    """Set `variables` from what `pack` made; raises WorkerError when it does not fit them."""
    length, total = _HEAD.unpack(packed[: _HEAD.size].tobytes())
    place = _HEAD.size + length
    arrays = [np.asarray(variable.value) for variable in variables]
    expected = place + sum(array.nbytes for array in arrays)
    if not total == expected == len(packed):
        raise WorkerError(
            f"the kept state has {len(packed)} bytes, this model's has {expected}",
            remedy="the model or the optimizer has changed since; start a new run",
        )
    for variable, array in zip(variables, arrays, strict=True):
        piece = packed[place : place + array.nbytes].copy().view(array.dtype).reshape(array.shape)
        variable.assign(piece)
        place += array.nbytes
    return position_of(packed)


def position_of(packed: Array) -> Position:
    """The position alone; raises WorkerError when it cannot be read."""
    length, _ = _HEAD.unpack(packed[: _HEAD.size].tobytes())
    try:
        return from_json(Position, packed[_HEAD.size : _HEAD.size + length].tobytes().decode())
    except ProtocolError as error:
        raise WorkerError(f"the kept state cannot be read: {error}", remedy="start a new run") from None


class StepFile:
    """The state after the latest step, in two halves that are written in turn.

    A process that dies while it writes leaves the other half whole. The file is mapped: what was written is
    in the kernel's hands at once, and needs no more of the process.
    """

    _MARK = struct.Struct("<qqI")
    """Before each half: the step it holds when whole, the bytes used, their CRC-32 over the head of them."""

    def __init__(self, path: Path, variables: list[Any]) -> None:
        """Open `path` for states of `variables`; raises OSError when there is no room."""
        state_bytes = sum(np.asarray(variable.value).nbytes for variable in variables)
        whole_pages = -(-(state_bytes + POSITION_ROOM_BYTES) // mmap.PAGESIZE)
        self._half_bytes = whole_pages * mmap.PAGESIZE
        size = 2 * self._half_bytes
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
                os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._next = 0

    def write(self, variables: list[Any], position: Position) -> None:
        """Keep `variables`, the state at `position`."""
        start = self._next * self._half_bytes
        self._mark(start, -1, 0, 0)
        body = start + self._MARK.size
        packed = pack(variables, position, self._bytes[body : start + self._half_bytes])
        self._mark(start, position.total_steps, len(packed), zlib.crc32(packed[:4096].tobytes()))
        self._next = 1 - self._next

    def _mark(self, start: int, *values: int) -> None:
        mark = self._MARK.pack(*values)
        self._bytes[start : start + len(mark)] = np.frombuffer(mark, np.uint8)

    @classmethod
    def read(cls, path: Path) -> Array | None:
        """The latest whole state in the file at `path`, None when there is none."""
        try:
            content = np.fromfile(path, np.uint8)
        except OSError:
            return None
        found: tuple[int, Array] | None = None
        for start in (0, len(content) // 2):
            head = content[start : start + cls._MARK.size]
            if len(head) < cls._MARK.size:
                continue
            step, used, check = cls._MARK.unpack(head.tobytes())
            packed = content[start + cls._MARK.size : start + cls._MARK.size + used]
            is_whole = step >= 0 and used == len(packed) > 0 and zlib.crc32(packed[:4096].tobytes()) == check
            if is_whole and (found is None or step > found[0]):
                found = (step, packed)
        return found[1] if found else None


@dataclass
class Checkpoints:
    """A run's checkpoints on disk: written aside, synced, renamed; the newest few and the best are kept."""

    directory: Path
    num_kept: int = 3

    def save(self, packed: Array, position: Position, *, is_best: bool = False) -> Path:
        """Write one and remove those that are no longer kept; raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"step-{position.total_steps:08d}.npz"
        aside = self.directory / f".part-{path.name}"
        with aside.open("wb") as file:
            np.savez(file, state=packed)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_directory(self.directory)
        if is_best:
            (self.directory / "best.json").write_text(json.dumps({"checkpoint": path.name}))
        self._remove_old()
        return path

    def newest(self) -> Array | None:
        """The newest state that can be read whole: a damaged one is passed over for the one before."""
        for path in sorted(self.directory.glob("step-*.npz"), reverse=True):
            with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                with np.load(path, allow_pickle=False) as archive:
                    # Reading to the end checks the archive's CRC-32.
                    state: Array = archive["state"]
                return state
        return None

    def _best(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((self.directory / "best.json").read_text())["checkpoint"])
        return ""

    def _remove_old(self) -> None:
        best = self._best()
        for path in sorted(self.directory.glob("step-*.npz"), reverse=True)[self.num_kept :]:
            if path.name != best:
                path.unlink(missing_ok=True)
