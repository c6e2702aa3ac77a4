"""Where a training's state survives: the step file (the machine's memory) and checkpoints (disk).

The step file is written after every step and survives the process. A checkpoint is synced and survives the
machine. Neither is trusted when it is read: owner, size and format come first, then position.py checks what
is in it.
"""

import contextlib
import io
import json
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.process.files import DAMAGED_ARCHIVE, BoundedFile, open_private, sync_directory
from csdctl.worker.tasks.position import Position, max_state_bytes, pack

_START = struct.Struct("<8sH")
"""Of an .npy file: magic and version, and the length of the header that follows."""
_ARCHIVE_BYTES = 1 << 16
"""What an .npz archive with one array may have beyond the array."""


class StepFile:
    """The state after the latest step, in two halves that are written alternately.

    A process that dies while writing leaves the other half intact. The file is memory-mapped: the kernel
    keeps what was written when the process dies. It exists from the first step on.
    """

    _MARK = struct.Struct("<qqI")
    """Before each half: its step when it is complete, the bytes used, and the CRC-32 of their first 4 KiB."""

    def __init__(self, path: Path, variables: list[Any]) -> None:
        """`path`: of states of `variables`."""
        self._path = path
        whole_pages = -(-(self._MARK.size + max_state_bytes(variables)) // mmap.PAGESIZE)
        self._half_bytes = whole_pages * mmap.PAGESIZE
        self._bytes: Array | None = None
        self._next = 0

    def write(self, variables: list[Any], position: Position) -> None:
        """Write `variables`, the state at `position`; raises OSError when there can be no such file."""
        if self._bytes is None:
            self._bytes = self._open()
        start = self._next * self._half_bytes
        self._mark(self._bytes, start, -1, 0, 0)
        body = start + self._MARK.size
        packed = pack(variables, position, self._bytes[body : start + self._half_bytes])
        self._mark(self._bytes, start, position.total_steps, len(packed), zlib.crc32(packed[:4096].tobytes()))
        self._next = 1 - self._next

    def read(self) -> Array | None:
        """Return the latest complete state, or None; raises OSError unless the file is this user's own."""
        try:
            descriptor = open_private(self._path)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size != 2 * self._half_bytes:
                return None
            content = np.fromfile(file, np.uint8, 2 * self._half_bytes)
        found: tuple[int, Array] | None = None
        for half, start in enumerate((0, self._half_bytes)):
            body = start + self._MARK.size
            step, used, check = self._MARK.unpack(content[start:body].tobytes())
            packed = content[body : start + self._half_bytes][: max(0, used)]
            is_whole = step >= 0 and used == len(packed) > 0 and zlib.crc32(packed[:4096].tobytes()) == check
            if is_whole and (found is None or step > found[0]):
                found = (step, packed)
                self._next = 1 - half
        return found[1] if found else None

    def _open(self) -> Array:
        size = 2 * self._half_bytes
        descriptor = open_private(self._path, is_creating=True)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
                os.posix_fallocate(descriptor, 0, size)
            return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        finally:
            os.close(descriptor)

    def _mark(self, into: Array, start: int, *values: int) -> None:
        mark = self._MARK.pack(*values)
        into[start : start + len(mark)] = np.frombuffer(mark, np.uint8)


@dataclass
class Checkpoints:
    """A run's checkpoints on disk: written aside, synced, renamed. The newest few and the best are kept."""

    directory: Path
    num_kept: int = 3

    def save(self, packed: Array, position: Position, *, is_best: bool = False) -> Path:
        """Write a checkpoint and remove those that are no longer kept; raises OSError."""
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

    def exist(self) -> bool:
        """Return whether any was saved, intact or not."""
        return any(self.directory.glob("step-*.npz"))

    def newest_first(self, max_bytes: int) -> Iterator[Array]:
        """Yield the intact states of at most `max_bytes`; the others are skipped."""
        for path in sorted(self.directory.glob("step-*.npz"), reverse=True):
            try:
                state = _read_checkpoint(path, max_bytes)
            except DAMAGED_ARCHIVE:
                continue
            yield state

    def _best(self) -> str:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            return str(json.loads((self.directory / "best.json").read_text())["checkpoint"])
        return ""

    def _remove_old(self) -> None:
        best = self._best()
        for path in sorted(self.directory.glob("step-*.npz"), reverse=True)[self.num_kept :]:
            if path.name != best:
                path.unlink(missing_ok=True)


def _read_checkpoint(path: Path, max_bytes: int) -> Array:
    """Return the state, shape (n,), uint8; memory is allocated for what is there, not for what a header says.

    Raises one of DAMAGED_ARCHIVE.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with BoundedFile(io.FileIO(descriptor)) as file:
        if os.fstat(descriptor).st_size > max_bytes + _ARCHIVE_BYTES:
            raise ValueError("too large for this model")
        with zipfile.ZipFile(file) as archive:
            member = archive.getinfo("state.npy")
            if member.file_size > max_bytes + _ARCHIVE_BYTES:
                raise ValueError("too large for this model")
            content = archive.read(member)  # reading to the end checks the archive's CRC-32
    start = _START.size + _START.unpack_from(content)[1]
    state = np.frombuffer(content, np.uint8, offset=start)
    # numpy would parse the header as Python. There is only one that can be right.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": state.shape}
    )
    if content[:start] != header.getvalue():
        raise ValueError("not one array of bytes")
    return state
