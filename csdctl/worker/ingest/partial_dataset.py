"""A data set that is being prepared: a directory from which an interrupted `prepare` resumes.

Samples are appended to images.npy and labels.npy, never written through a memory map: a full disk is then an
error instead of a signal that kills the process. Every few seconds the files are synced, and record.json
states how much of them is valid. Anything written later is truncated on resume.

Only its user may read it, or on a shared file system whoever may read the source."""

import errno
import fcntl
import io
import math
import operator
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from csdctl.worker.data.arrays import (
    MAX_HEADER_BYTES,
    Array,
    as_labels,
    dtype_from_text,
    dtype_to_text,
    fields_of,
)
from csdctl.worker.data.file_hash import hash_file, open_regular
from csdctl.worker.ingest.sources.source import DEFAULT_LIMITS, Block, IngestLimits, Tree
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import save_atomically, sync_directory, sync_file
from csdctl.worker.protocol.datasets import LABEL, DatasetInfo
from csdctl.worker.protocol.json_codec import Count, Shape, from_json, to_json

PRIVATE_DIRECTORY, PRIVATE_FILE = 0o700, 0o600
_GROUP_READS, _OTHERS_READ = 0o040, 0o004
_READ = _GROUP_READS | _OTHERS_READ


def open_private(path: Path, *, is_new: bool) -> IO[bytes]:
    """Open a file to read and write, through no link; a new one for this user alone."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if is_new else 0)
    return os.fdopen(os.open(path, flags, PRIVATE_FILE), "r+b")


def make_store(store: Path, source: Path, *, is_shared: bool) -> None:
    """Create the directory of prepared data sets; raises WorkerError where another user could change them.

    On a shared file system it may belong to the owner of the source, who can change the samples anyway.
    """
    store.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    owners = {os.geteuid(), *({0, source.stat().st_uid} if is_shared else ())}
    found = store.stat()
    if not {store.lstat().st_uid, found.st_uid} <= owners:
        raise WorkerError(
            f"{store} belongs to another user, who could change prepared data", remedy="remove it"
        )
    if found.st_uid == os.geteuid():
        # Each data set in a shared store has its own permissions: here only names are seen.
        readers = store.parent.stat().st_mode & (_READ | _READ >> 2) if is_shared else 0
        if stat.S_IMODE(found.st_mode) != PRIVATE_DIRECTORY | readers:
            store.chmod(PRIVATE_DIRECTORY | readers)
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise WorkerError(f"other users can change {store}", remedy="remove it, or run `chmod go-w` on it")


def is_open_to_change(directory: Path) -> bool:
    """Return whether group or others could change a data set, as after a call under another umask."""
    modes = [path.lstat().st_mode for path in (directory, *directory.iterdir())]
    return any(mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(mode) for mode in modes)


def set_access(directory: Path, tree: Tree, *, is_shared: bool) -> None:
    """Let only those read the data set in `directory` who may read every file of its source.

    Private without `is_shared`. Also narrows a data set of an earlier call.
    """
    if directory.stat().st_uid != os.geteuid():
        return
    readers = _readers(tree) if is_shared else 0
    if directory.stat().st_gid != tree.root.stat().st_gid:
        readers &= ~_GROUP_READS
    for path in (*directory.iterdir(), directory):
        mode = PRIVATE_DIRECTORY | readers | readers >> 2 if path == directory else PRIVATE_FILE | readers
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def _readers(tree: Tree) -> int:
    """Return the permissions of group and others to read every file of `tree`."""
    readers = _READ
    directories = {tree.root.joinpath(*file.parts[:-1]) for file in tree.files if file.parts}
    for directory in directories | {above for path in directories for above in path.parents}:
        if directory.is_relative_to(tree.root):
            mode = directory.stat().st_mode
            readers &= mode & mode << 2  # to list a directory, and to enter it
    for file in tree.files:
        if not readers:
            break
        with suppress(FileNotFoundError):  # a dangling link
            readers &= tree.path_of(file).stat().st_mode
    return readers


_RECORD, _DESCRIPTION = "record.json", "dataset.json"
_MAX_DESCRIPTION_BYTES = 16 << 20
_ARRAYS = ("images.npy", "labels.npy")
_SPARE_HEADER_BYTES = 1000
"""Of a .npy header, for all but the fields."""


@dataclass(frozen=True)
class IngestRecord:
    """Progress of a data set: `num_read` samples were processed, the files have `num_samples` of them."""

    fingerprint: str
    num_read: Count = 0
    num_samples: Count = 0
    sample_shape: Shape = ()
    dtype: str = ""
    label_shape: Shape = ()
    label_dtype: str = ""
    min_labels: dict[str, int] = field(default_factory=dict)
    """Of each field of integers, '' for the only one; at most 0."""
    max_labels: dict[str, int] = field(default_factory=dict)
    max_values: dict[str, int] = field(default_factory=dict)
    """The largest integer of each input, without uint8."""
    num_skipped: dict[str, Count] = field(default_factory=dict)
    class_counts: tuple[Count, ...] = ()

    def arrays(self) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the samples, and of the labels."""
        return [
            ((self.num_samples, *self.sample_shape), self.dtype),
            ((self.num_samples, *self.label_shape), self.label_dtype),
        ]

    def file_sizes(self) -> list[int]:
        """Return how many bytes of each file are valid; raises ValueError if there can be no such arrays."""
        return [
            len(_build_header(shape, dtype)) + dtype_from_text(dtype).itemsize * math.prod(shape)
            for shape, dtype in self.arrays()
        ]


class PartialDataset:
    """The directory of an unfinished data set, locked by one process at a time."""

    def __init__(
        self, directory: Path, fingerprint: str, num_classes: int, limits: IngestLimits = DEFAULT_LIMITS
    ) -> None:
        """Resume the work of an earlier call with the same `fingerprint`, or start from scratch.

        Raises WorkerError if another process has the lock, or the disk fails.
        """
        self._directory = directory
        self._sync_interval_s = limits.sync_interval_s
        with convert_write_errors():
            self._lock = _lock_directory(directory, limits.lock_deadline_s)
            self.record = _load_record(directory, fingerprint)
            if self.record.num_read == 0:
                self.record = IngestRecord(fingerprint, class_counts=(0,) * num_classes)
            self._files: list[IO[bytes]] = [
                open_private(directory / name, is_new=not self.record.num_samples) for name in _ARRAYS
            ]
            self._truncate_to_record()
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Discard the work after a WorkerError; keep it for the next call after any other exception."""
        if isinstance(error, WorkerError):
            self.discard()
        elif error:
            self.close()

    def append(self, block: Block) -> None:
        """Add a block; raises WorkerError if its samples differ in shape or type from earlier ones."""
        with convert_write_errors():
            if len(block.samples):
                labels = as_labels(block.labels)
                self._check_shapes(block.samples, labels)
                for file, array in zip(self._files, (block.samples, labels), strict=True):
                    file.write(np.ascontiguousarray(array).data)
            self.record = count(self.record, block)
            if time.monotonic() - self._synced_at >= self._sync_interval_s:
                self.sync()

    def declare(self, samples: Array, labels: Array) -> None:
        """Take shapes and types from samples (0, …) and labels (0, …), for a data set that may stay empty."""
        with convert_write_errors():
            self._check_shapes(samples, as_labels(labels))

    def sync(self) -> None:
        """Sync the files to disk, then the record that says how much of them is valid."""
        for file in self._files:
            sync_file(file)
        save_atomically(self._directory / _RECORD, to_json(self.record))
        self._synced_at = time.monotonic()

    def finish(self, target: Path, info: DatasetInfo) -> DatasetInfo:
        """Rename the directory to `target`, with `info` as dataset.json; return `info` with the hashes."""
        with convert_write_errors():
            self._write_headers()
            for file in self._files:
                sync_file(file)
            info = hash_arrays(info, self._directory)
            save_atomically(self._directory / _DESCRIPTION, to_json(info))
            (self._directory / _RECORD).unlink(missing_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # without a dataset.json: damaged, or not csdctl's
            os.rename(self._directory, target)
            sync_directory(target.parent)
        self.close()
        return info

    def discard(self) -> None:
        """Delete the directory and release the lock."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock and leave the directory to be resumed."""
        for file in self._files:
            with suppress(OSError):  # the disk is full, which was reported before
                file.close()
        os.close(self._lock)

    def _write_headers(self) -> None:
        for file, (shape, dtype) in zip(self._files, self.record.arrays(), strict=True):
            file.seek(0)
            file.write(_build_header(shape, dtype))

    def _truncate_to_record(self) -> None:
        """Drop what was written after the record."""
        if not self.record.num_samples:
            return
        for file, size in zip(self._files, self.record.file_sizes(), strict=True):
            file.truncate(size)
            file.seek(0, os.SEEK_END)

    def _check_shapes(self, samples: Array, labels: Array) -> None:
        """Take shapes and types from the first samples; raise WorkerError if later ones differ."""
        before, self.record = self.record, take_types(self.record, samples, labels)
        if before.num_samples == 0:
            for file in self._files:
                file.seek(0)
                file.truncate()
            self._write_headers()
        elif self.record != before:
            raise WorkerError(
                "the data has samples or labels of different shapes or types",
                remedy="give all samples the same shape and type",
                exit_code=2,
            )


def hash_arrays(info: DatasetInfo, directory: Path) -> DatasetInfo:
    """Return `info` with the hashes of the arrays in `directory`; raises OSError, ValueError, WorkerError."""
    hashes = []
    for name in _ARRAYS:
        with open_regular(directory / name) as file:
            hashes.append(hash_file(file, name))
    return replace(info, images_sha256=hashes[0], labels_sha256=hashes[1])


def take_types(record: IngestRecord, samples: Array, labels: Array) -> IngestRecord:
    """Return `record` with the shapes and types of these samples (n, …) and labels (n, …)."""
    return replace(
        record,
        sample_shape=samples.shape[1:],
        dtype=dtype_to_text(samples.dtype),
        label_shape=labels.shape[1:],
        label_dtype=dtype_to_text(labels.dtype),
    )


def count(record: IngestRecord, block: Block) -> IngestRecord:
    """Return `record` with one more block: its samples, the range of its labels and of integer inputs."""
    lowest, highest, largest = dict(record.min_labels), dict(record.max_labels), dict(record.max_values)
    counts = np.array(record.class_counts, np.int64)
    for name, array in fields_of(as_labels(block.labels)).items() if len(block.samples) else ():
        if array.dtype.kind != "i" or not array.size:
            continue
        lowest[name] = min(int(array.min()), lowest.get(name, 0))
        highest[name] = max(int(array.max()), highest.get(name, -1))
        if array.ndim == 1 and name in ("", LABEL) and lowest[name] >= 0:
            counts += np.bincount(array[array < len(counts)], minlength=len(counts))
    for name, array in fields_of(block.samples).items():
        if array.dtype.kind in "iu" and array.dtype != np.uint8 and array.size:
            largest[name] = max(int(array.max()), largest.get(name, -1))
    skipped = Counter(record.num_skipped) + block.skipped
    return replace(
        record,
        num_read=record.num_read + block.num_read,
        num_samples=record.num_samples + len(block.samples),
        num_skipped=dict(sorted(skipped.items())),
        min_labels=lowest,
        max_labels=highest,
        max_values=largest,
        class_counts=tuple(counts.tolist()),
    )


def describe(record: IngestRecord, path: Path) -> DatasetInfo:
    """Return the description of a data set whose arrays are in `path`, without classes and hashes."""
    largest = {
        name: value if record.min_labels[name] >= 0 else -1 for name, value in record.max_labels.items()
    }
    return DatasetInfo(
        path=str(path),
        num_samples=record.num_samples,
        sample_shape=record.sample_shape,
        dtype=record.dtype,
        label_shape=record.label_shape,
        max_label=largest.get("", -1),
        fingerprint=record.fingerprint,
        num_skipped=record.num_skipped,
        label_dtype=record.label_dtype,
        max_labels=largest,
        max_values=record.max_values,
    )


def find_stored(target: Path, places: Collection[Path], *, is_checked: bool) -> DatasetInfo | None:
    """Return the description of a data set that was stored before; None if it is missing, damaged or edited.

    Its arrays must be in one of `places`; with `is_checked`, they are compared with their hashes. Data that
    another user could change does not count.
    """
    try:
        if is_open_to_change(target):
            return None
        with open_regular(target / _DESCRIPTION) as file:
            info = from_json(DatasetInfo, file.read(_MAX_DESCRIPTION_BYTES).decode())
        is_whole = info.images_sha256 and info.labels_sha256 and info.label_dtype
        is_of_target = info.fingerprint == target.name and info.path in map(str, places)
        if not is_whole or not is_of_target or (is_checked and hash_arrays(info, Path(info.path)) != info):
            return None
        return info
    except (OSError, ValueError, WorkerError):  # a ProtocolError is a ValueError
        return None


@contextmanager
def convert_write_errors() -> Iterator[None]:
    """Convert errors of the disk to a WorkerError that names no file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "not enough disk space"
        remedy = "fix the disk or its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None):
            remedy = "free disk space"
        raise WorkerError(f"prepared data cannot be written: {reason}", remedy=remedy) from None


def check_free_space(needed_bytes: int, store: str, what: str, remedy: str = "") -> None:
    """Raise WorkerError if the disk of `store` is too small for `what`, before hours of work are wasted."""
    free_bytes = shutil.disk_usage(store).free
    if needed_bytes > free_bytes:
        raise WorkerError(
            f"{what} cannot be written: {needed_bytes / 1e9:.1f} GB are needed, "
            f"{free_bytes / 1e9:.1f} GB are free",
            remedy="free disk space" + (f", or {remedy}" if remedy else ""),
        )


def _lock_directory(directory: Path, deadline_s: float) -> int:
    """Create `directory` and lock it. The kernel releases the lock when this process ends.

    Raises WorkerError if another process has the lock until `deadline_s` has passed, or if it belongs to
    another user. What is in a directory that others could change is removed.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(lock)
            if os.path.samestat(found, directory.stat()):  # not renamed by the previous holder
                if found.st_uid != os.geteuid():
                    os.close(lock)
                    raise WorkerError(f"{directory} belongs to another user", remedy="remove it")
                if not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return lock
                shutil.rmtree(directory)
        os.close(lock)
        if time.monotonic() > deadline:
            raise WorkerError(
                "another csdctl is preparing the same data", remedy="wait until it has finished"
            )
        time.sleep(0.1)


def _load_record(directory: Path, fingerprint: str) -> IngestRecord:
    """Return the record of an earlier call.

    It is empty if the data or the job has changed since, or the files do not hold what it states.
    """
    with suppress(OSError, ValueError):  # a ProtocolError is a ValueError
        record = from_json(IngestRecord, (directory / _RECORD).read_text())
        if record.fingerprint == fingerprint and _is_held(record, directory):
            return record
    return IngestRecord(fingerprint)


def _is_held(record: IngestRecord, directory: Path) -> bool:
    """Return whether the files in `directory` have what `record` states."""
    if not record.num_samples:
        return True
    try:
        found = [(directory / name).stat().st_size for name in _ARRAYS]
        return all(map(operator.ge, found, record.file_sizes()))
    except (OSError, ValueError, WorkerError):
        return False


def _build_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the .npy header, which is as long for any number of rows: numpy pads it so that it can grow.

    Raises ValueError for a type that numpy does not know.
    """
    described = np.lib.format.dtype_to_descr(dtype_from_text(dtype))
    if len(repr(described)) > MAX_HEADER_BYTES - _SPARE_HEADER_BYTES:
        raise WorkerError(
            f"the data has too many inputs or outputs: {len(dtype_from_text(dtype).names or ()):,}",
            remedy="make one input of several: one vector in place of single numbers",
            exit_code=2,
        )
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})
    return file.getvalue()
