"""Where a training's state survives: the step file (the machine's memory) and checkpoints (disk).

The step file is written after every step and survives the process. A checkpoint is synced and survives the
machine.
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
from csdctl.worker.process.files import sync_directory
from csdctl.worker.tasks.position import MAX_POSITION_BYTES, Position, pack


class StepFile:
    """The state after the latest step, in two halves that are written alternately.

    A process that dies while writing leaves the other half intact. The file is memory-mapped: the kernel
    keeps what was written when the process dies.
    """

    _MARK = struct.Struct("<qqI")
    """Before each half: its step when it is complete, the bytes used, and the CRC-32 of their first 4 KiB."""

    def __init__(self, path: Path, variables: list[Any]) -> None:
        """Open `path` for states of `variables`; raises OSError when the disk is full."""
        state_bytes = sum(np.asarray(variable.value).nbytes for variable in variables)
        whole_pages = -(-(state_bytes + MAX_POSITION_BYTES) // mmap.PAGESIZE)
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
        """Write `variables`, the state at `position`."""
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
        """Return the latest complete state in the file at `path`, or None."""
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

    def newest(self) -> Array | None:
        """Return the newest intact state; a damaged checkpoint is skipped for the one before it."""
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
