"""A data set while it is being prepared: a directory that an interrupted `prepare` goes on with.

Samples are appended to images.npy and labels.npy, never written through a map: a disk that is full is then
an error and not the end of the process. Every few seconds the files are synced and record.json says how far
they count; what was written after that is cut off when work goes on.
"""

import errno
import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np

from csdctl.worker.data.arrays import Array, as_labels
from csdctl.worker.data.element_spec import dtype_from_text, dtype_to_text
from csdctl.worker.ingest.sources.source import Block
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import save_aside, sync_directory, sync_file
from csdctl.worker.protocol.json_codec import ProtocolError, from_json, to_json

LOCK_DEADLINE_S = 10.0
"""A worker whose csdctl was ended may take a moment to end too."""

_RECORD = "record.json"


@dataclass(frozen=True)
class PartRecord:
    """How far a data set is; `num_read` samples were looked at, `num_samples` of them are in the files."""

    fingerprint: str
    num_read: int = 0
    num_samples: int = 0
    sample_shape: tuple[int, ...] = ()
    dtype: str = ""
    label_shape: tuple[int, ...] = ()
    label_dtype: str = ""
    min_label: int = 0
    max_label: int = -1
    num_skipped: dict[str, int] = field(default_factory=dict)
    class_counts: tuple[int, ...] = ()


class Part:
    """A part directory, held by one process at a time."""

    def __init__(self, directory: Path, fingerprint: str, num_classes: int) -> None:
        """Open what an earlier call left of the same `fingerprint`, else begin.

        Raises WorkerError when another process is at it, or the disk refuses.
        """
        self._directory = directory
        with writing():
            self._lock = _take_lock(directory)
            self.record = _load_record(directory, fingerprint)
            if self.record.num_read == 0:
                self.record = PartRecord(fingerprint, class_counts=(0,) * num_classes)
            self._files: list[IO[bytes]] = [
                (directory / name).open("r+b" if self.record.num_samples else "w+b")
                for name in ("images.npy", "labels.npy")
            ]
            self._cut()
        self._synced_at = time.monotonic()

    def append(self, block: Block, *, sync_interval_s: float) -> None:
        """Add a block; raises WorkerError when its samples are of another form than those before."""
        with writing():
            if len(block.images):
                labels = as_labels(block.labels)
                self._take_form(block.images, labels)
                for file, array in zip(self._files, (block.images, labels), strict=True):
                    file.write(np.ascontiguousarray(array).data)
                self.record = count_labels(self.record, labels)
            skipped = Counter(self.record.num_skipped) + block.skipped
            self.record = replace(
                self.record,
                num_read=self.record.num_read + block.num_read,
                num_samples=self.record.num_samples + len(block.images),
                num_skipped=dict(sorted(skipped.items())),
            )
            if time.monotonic() - self._synced_at >= sync_interval_s:
                self.sync()

    def sync(self) -> None:
        """Put what there is on the disk, then the record that counts it."""
        for file in self._files:
            sync_file(file)
        save_aside(self._directory / _RECORD, to_json(self.record))
        self._synced_at = time.monotonic()

    def finish(self, target: Path, description: str) -> None:
        """Make it `target`, with `description` as its dataset.json; a reader never sees half of it."""
        with writing():
            for file, shape, dtype in self._forms():
                file.seek(0)
                _write_header(file, shape, dtype)
                sync_file(file)
            save_aside(self._directory / "dataset.json", description)
            (self._directory / _RECORD).unlink(missing_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # it has no dataset.json: not ours, or damaged
            os.rename(self._directory, target)
            sync_directory(target.parent)
        self.close()

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let another process have it."""
        for file in self._files:
            with suppress(OSError):  # the disk is full, which was said before
                file.close()
        os.close(self._lock)

    def _forms(self) -> list[tuple[IO[bytes], tuple[int, ...], str]]:
        record = self.record
        images, labels = self._files
        return [
            (images, (record.num_samples, *record.sample_shape), record.dtype),
            (labels, (record.num_samples, *record.label_shape), record.label_dtype),
        ]

    def _cut(self) -> None:
        """Drop what was written behind the record."""
        if not self.record.num_samples:
            return
        for file, shape, dtype in self._forms():
            file.seek(0)
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            file.truncate(file.tell() + dtype_from_text(dtype).itemsize * int(np.prod(shape)))
            file.seek(0, os.SEEK_END)

    def _take_form(self, images: Array, labels: Array) -> None:
        record = self.record
        form = (images.shape[1:], dtype_to_text(images.dtype), labels.shape[1:], str(labels.dtype))
        if record.num_samples == 0:
            self.record = replace(
                record, sample_shape=form[0], dtype=form[1], label_shape=form[2], label_dtype=form[3]
            )
            for file, shape, dtype in self._forms():
                file.seek(0)
                file.truncate()
                _write_header(file, shape, dtype)
        elif form != (record.sample_shape, record.dtype, record.label_shape, record.label_dtype):
            raise WorkerError("the data has samples or labels of different shapes or types", exit_code=2)


def count_labels(record: PartRecord, labels: Array) -> PartRecord:
    """`record` with the range of `labels` and, when they are class numbers, how many each class has."""
    if labels.dtype.kind != "i" or not labels.size:
        return record
    low, high = int(labels.min()), int(labels.max())
    counts = np.array(record.class_counts, np.int64)
    if labels.ndim == 1 and low >= 0:
        counts += np.bincount(labels[labels < len(counts)], minlength=len(counts))
    return replace(
        record,
        min_label=min(low, record.min_label),
        max_label=max(high, record.max_label),
        class_counts=tuple(int(count) for count in counts),
    )


@contextmanager
def writing() -> Iterator[None]:
    """Turn what a disk refuses into a WorkerError that names no file."""
    try:
        yield
    except OSError as error:
        words = error.strerror or "no room for all of it"
        remedy = "mend the disk or its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None):
            remedy = "make room on the disk"
        raise WorkerError(f"prepared data cannot be written: {words}", remedy=remedy) from None


def _take_lock(directory: Path) -> int:
    """Make `directory` and lock it. The lock ends with this process, however it ends.

    Raises WorkerError when another process has it.
    """
    deadline = time.monotonic() + LOCK_DEADLINE_S
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), directory.stat()):  # not renamed by who had it before
                return lock
        os.close(lock)
        if time.monotonic() > deadline:
            raise WorkerError("another csdctl prepares the same data", remedy="wait until it is done")
        time.sleep(0.1)


def _load_record(directory: Path, fingerprint: str) -> PartRecord:
    """What an earlier call left; nothing of it counts when the data or the job has changed since."""
    try:
        record = from_json(PartRecord, (directory / _RECORD).read_text())
    except (OSError, ProtocolError, UnicodeDecodeError):
        return PartRecord(fingerprint)
    return record if record.fingerprint == fingerprint else PartRecord(fingerprint)


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: str) -> None:
    """numpy leaves room for the number of rows to grow: the header of any count is as long."""
    described = np.lib.format.dtype_to_descr(dtype_from_text(dtype))
    np.lib.format.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})
