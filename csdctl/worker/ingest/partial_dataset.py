"""A data set that is being prepared: a directory from which an interrupted `prepare` resumes.

Samples are appended to images.npy and labels.npy, never written through a memory map: a full disk is then an
error instead of a signal that kills the process. Every few seconds the files are synced, and record.json
states how much of them is valid. Anything written later is truncated on resume.

Only its user may read it, or on a shared file system whoever may read the source."""

import fcntl
import io
import math
import operator
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from csdctl.worker.data import arrays
from csdctl.worker.data.arrays import Array, as_labels, dtype_to_text, fields_of
from csdctl.worker.data.file_hash import hash_file, open_regular
from csdctl.worker.ingest.sources.source import GIVE_ONE_SHAPE, Block, Tree, convert_write_errors
from csdctl.worker.process.errors import JobError, WorkerError
from csdctl.worker.process.files import open_private
from csdctl.worker.protocol import json_codec
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, SKIPPED, DatasetInfo
from csdctl.worker.protocol.durable_files import make_directory, save_bytes, save_text, sync
from csdctl.worker.protocol.json_codec import add_check, from_json, to_json

PRIVATE_DIRECTORY, PRIVATE_FILE = 0o700, 0o600
GROUP_READS, OTHERS_READ = 0o040, 0o004
READ = GROUP_READS | OTHERS_READ
"""Permissions of files and directories."""
MAX_NAMED = 5
"""Skipped samples that a description names."""
SYNC_INTERVAL_S = 5.0
"""Upper limit of the work that is repeated after an interruption."""
LOCK_DEADLINE_S = 10.0
"""Seconds to wait for a worker that has the lock; one whose csdctl was killed takes a moment to exit."""
ARRAYS = ("images.npy", "labels.npy")
SPARE_HEADER_BYTES = 1000
"""Room in a .npy header for all but the fields."""
RECORD, DESCRIPTION = "record.json", "dataset.json"
"""Description of the valid part of unfinished data, and of finished data."""
MAX_DESCRIPTION_BYTES = 16 << 20


@convert_write_errors()
def make_store(store: Path, source: Path, *, is_shared: bool) -> None:
    """Create the store. Raises WorkerError where others could change it, but the source's owner."""
    make_directory(store)
    owners = {os.geteuid(), *({0, source.stat().st_uid} if is_shared else ())}
    status = store.stat()
    if not {store.lstat().st_uid, status.st_uid} <= owners:
        raise WorkerError(f"{store} belongs to another user, who could change prepared data", "remove it")
    if status.st_uid == os.geteuid():
        # Each data set in a shared store has its own permissions: here only names are seen.
        readers = store.parent.stat().st_mode & (READ | READ >> 2) if is_shared else 0
        if stat.S_IMODE(status.st_mode) != PRIVATE_DIRECTORY | readers:
            store.chmod(PRIVATE_DIRECTORY | readers)
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise WorkerError(f"other users can change {store}", remedy="remove it, or run `chmod go-w` on it")


def set_access(directory: Path, tree: Tree, *, is_shared: bool) -> None:
    """Let only those read the data set who may read its source, or with `is_shared` False, this user."""
    if directory.stat().st_uid != os.geteuid():
        return
    readers = _readers(tree) if is_shared else 0
    if directory.stat().st_gid != tree.root.stat().st_gid:
        readers &= ~GROUP_READS
    for path in (*directory.iterdir(), directory):
        mode = PRIVATE_DIRECTORY | readers | readers >> 2 if path == directory else PRIVATE_FILE | readers
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def _readers(tree: Tree) -> int:
    readers = READ
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


def empty_info(fingerprint: str, class_names: Sequence[str] = ()) -> DatasetInfo:
    """Return the description of a data set without samples."""
    counts = dict.fromkeys(class_names, 0)
    return DatasetInfo("", 0, (), "", (), max_label=-1, fingerprint=fingerprint, class_counts=counts)


def add_block(info: DatasetInfo, block: Block) -> DatasetInfo:
    """Return `info` with one more block. Raises WorkerError if its shapes or types are others."""
    reasons = Counter(reason for reason, _ in block.skipped)
    num_skipped = dict(sorted((Counter(info.num_skipped) + reasons).items()))
    skipped = (*info.skipped, *(place for _, place in block.skipped))[:MAX_NAMED]
    info = replace(info, num_skipped=num_skipped, skipped=skipped)
    if not len(block.samples):
        return info
    labels = as_labels(block.labels)
    typed = take_types(info, block.samples, labels)
    if info.num_samples and typed != info:
        raise JobError("the data has samples or labels of different shapes or types", GIVE_ONE_SHAPE)
    max_labels, max_values, class_counts = dict(info.max_labels), dict(info.max_values), info.class_counts
    for name, array in fields_of(labels).items():
        if array.dtype.kind != "i" or not array.size:
            continue
        before = max_labels.get(name, 0)
        max_labels[name] = max(before, int(array.max())) if min(before, int(array.min())) >= 0 else -1
        if array.ndim == 1 and name in ("", LABEL) and max_labels[name] >= 0:
            counts = np.bincount(array[array < len(class_counts)], minlength=len(class_counts))
            sums = counts + np.array([*class_counts.values()], int)
            class_counts = dict(zip(class_counts, sums.tolist(), strict=True))
    if (weights := fields_of(labels).get(SAMPLE_WEIGHT)) is not None:
        max_values[SAMPLE_WEIGHT] = max(int(weights.any()), max_values.get(SAMPLE_WEIGHT, 0))
    for name, array in fields_of(block.samples).items():
        if array.dtype.kind in "iu" and array.dtype != np.uint8 and array.size:
            max_values[name] = max(int(array.max()), max_values.get(name, -1))
    return replace(
        typed,
        num_samples=info.num_samples + len(block.samples),
        max_label=max_labels.get(LABEL, max_labels.get("", -1)),
        max_labels=max_labels,
        max_values=max_values,
        class_counts=class_counts,
    )


def take_types(info: DatasetInfo, samples: Array, labels: Array) -> DatasetInfo:
    """Return `info` with the shapes and types of these samples (n, …) and labels (n, …)."""
    return replace(
        info,
        sample_shape=samples.shape[1:],
        dtype=dtype_to_text(samples.dtype),
        label_shape=labels.shape[1:],
        label_dtype=dtype_to_text(labels.dtype),
    )


def _headers(info: DatasetInfo) -> list[tuple[bytes, int]]:
    """Return headers and valid bytes of samples and of labels. A header is as long for any number of rows."""
    headers = []
    for shape, text in ((info.sample_shape, info.dtype), (info.label_shape, info.label_dtype)):
        dtype = arrays.dtype_from_text(text)
        described = np.lib.format.dtype_to_descr(dtype)
        if len(repr(described)) > arrays.MAX_HEADER_BYTES - SPARE_HEADER_BYTES:
            problem = f"the data has too many inputs or outputs: {len(dtype.names or ()):,}"
            raise JobError(problem, "combine inputs: one vector instead of single numbers")
        content = {"descr": described, "fortran_order": False, "shape": (info.num_samples, *shape)}
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, content)
        header = file.getvalue()
        headers.append((header, len(header) + dtype.itemsize * info.num_samples * math.prod(shape)))
    return headers


def _valid_bytes(info: DatasetInfo) -> list[int]:
    return [size for _, size in _headers(info)] if info.num_samples else [0, 0]


class PartialDataset:
    """The directory of an unfinished data set, locked by one process at a time."""

    def __init__(self, directory: Path, fingerprint: str, class_names: Sequence[str] = ()) -> None:
        """Resume an earlier call with this `fingerprint`, or begin. Raises WorkerError."""
        self._directory = directory
        self._opened = ExitStack()
        with convert_write_errors():
            self._opened.callback(os.close, _lock_directory(directory))
            self.info = _load_record(directory, fingerprint) or empty_info(fingerprint, class_names)
            self._files: list[IO[bytes]] = [
                self._opened.enter_context(os.fdopen(open_private(directory / name, is_creating=True), "r+b"))
                for name in ARRAYS
            ]
            if (names := directory / SKIPPED).exists():
                lines = names.read_text().splitlines(keepends=True)
                save_text(names, "".join(lines[: sum(self.info.num_skipped.values())]))
            for file, size in zip(self._files, _valid_bytes(self.info), strict=True):
                file.truncate(size)  # drops what was written after the record
                file.seek(0, os.SEEK_END)
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Discard the work after a WorkerError. Keep it for the next call after any other exception."""
        if isinstance(error, WorkerError):
            self.discard()
        else:
            self.close()

    def append(self, block: Block, *, is_copied: bool = True) -> None:
        """Add a block, described only without `is_copied`. Raises WorkerError for other shapes."""
        info = add_block(self.info, block)
        with convert_write_errors():
            if len(block.samples) and is_copied:
                labels = as_labels(block.labels)
                self.declare(block.samples, labels)
                for file, array in zip(self._files, (block.samples, labels), strict=True):
                    file.write(np.ascontiguousarray(array).data)
            if block.skipped:
                descriptor = open_private(self._directory / SKIPPED, is_creating=True)
                with os.fdopen(descriptor, "r+b") as names:
                    names.seek(0, os.SEEK_END)
                    names.writelines(f"{reason} {place}\n".encode() for reason, place in block.skipped)
            self.info = info
            if time.monotonic() - self._synced_at >= SYNC_INTERVAL_S:
                self.sync()

    def declare(self, samples: Array, labels: Array) -> None:
        """Take shapes and types, and write headers, unless there are some: the data set may stay empty."""
        if self.info.num_samples:
            return
        self.info = take_types(self.info, samples, as_labels(labels))
        with convert_write_errors():
            for file, (header, _) in zip(self._files, _headers(self.info), strict=True):
                file.seek(0)
                file.truncate()
                file.write(header)

    def sync(self) -> None:
        """Sync the files to disk, then the record that says how much of them is valid."""
        for file in self._files:
            file.flush()
        for name in (*ARRAYS, SKIPPED):
            with suppress(FileNotFoundError):  # not copied, or nothing was skipped
                sync(self._directory / name)
        save_text(self._directory / RECORD, to_json(self.info))
        self._synced_at = time.monotonic()

    def finish(
        self, target: Path, info: DatasetInfo | None = None, source: Path | None = None
    ) -> DatasetInfo:
        """Rename the directory to `target`. Return `info` with hashes and path, of `source` if not copied."""
        with convert_write_errors():
            for name, file, (header, _) in zip(ARRAYS, self._files, _headers(self.info), strict=True):
                if source:
                    (self._directory / name).unlink()
                    continue
                file.seek(0)
                file.write(header)
            self.sync()
            described = replace(info or self.info, path=str(source or target))
            info = hash_arrays(described, source or self._directory)
            save_bytes(self._directory / DESCRIPTION, add_check(to_json(info).encode())[0])
            (self._directory / RECORD).unlink(missing_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # without a dataset.json: damaged, or not csdctl's
            os.rename(self._directory, target)
            sync(target.parent)
        self.close()
        return info

    def discard(self) -> None:
        """Delete the directory and release the lock."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock and leave the directory to be resumed."""
        with suppress(OSError):  # the disk is full, which was reported before
            self._opened.close()


def hash_arrays(info: DatasetInfo, directory: Path) -> DatasetInfo:
    """Return `info` with the hashes of the arrays in `directory`. Raises OSError, ValueError, WorkerError."""
    with open_regular(directory / ARRAYS[0]) as images, open_regular(directory / ARRAYS[1]) as labels:
        (of_images, _), (of_labels, _) = hash_file(images, ARRAYS[0]), hash_file(labels, ARRAYS[1])
        return replace(info, images_sha256=of_images, labels_sha256=of_labels)


def find_stored(
    target: Path, places: Collection[Path] = (), *, is_checked: bool = True
) -> DatasetInfo | None:
    """Return the description of a stored data set. None if missing, damaged, edited, or open to others."""
    try:
        modes = [path.lstat().st_mode for path in (target, *target.iterdir())]
        if any(mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(mode) for mode in modes):
            return None
        with open_regular(target / DESCRIPTION) as file:
            content = file.read(MAX_DESCRIPTION_BYTES).rstrip()
        if not json_codec.is_unchanged(content):
            return None
        info = from_json(DatasetInfo, json_codec.remove_check(content).decode())
        is_complete = info.images_sha256 and info.labels_sha256 and info.label_dtype
        is_of_target = info.fingerprint == target.name and info.path in map(str, (target, *places))
        is_intact = not is_checked or hash_arrays(info, Path(info.path)) == info
        return info if is_complete and is_of_target and is_intact else None
    except (OSError, ValueError, WorkerError):  # a ProtocolError is a ValueError
        return None


def check_free_space(needed_bytes: int, store: str, what: str, remedy: str = "") -> None:
    """Raise WorkerError if the disk of `store` is too small for `what`, before hours of work are wasted."""
    free_bytes = shutil.disk_usage(store).free
    if needed_bytes > free_bytes:
        needed = f"{needed_bytes / 1e9:.1f} GB are needed, {free_bytes / 1e9:.1f} GB are free"
        remedy = "free disk space" + (f", or {remedy}" if remedy else "")
        raise WorkerError(f"{what} cannot be written: {needed}", remedy)


def _lock_directory(directory: Path) -> int:
    """Create `directory` and lock it. The kernel releases the lock when this process ends.

    Raises WorkerError if another process has the lock until LOCK_DEADLINE_S has passed, or if it belongs to
    another user. The content of a directory that others could change is removed.
    """
    deadline = time.monotonic() + LOCK_DEADLINE_S
    while True:
        make_directory(directory)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(lock)
            if os.path.samestat(status, directory.stat()):  # not renamed by the previous holder
                if status.st_uid != os.geteuid():
                    os.close(lock)
                    raise WorkerError(f"{directory} belongs to another user", remedy="remove it")
                if not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return lock
                shutil.rmtree(directory)
        os.close(lock)
        if time.monotonic() > deadline:
            raise WorkerError("another csdctl is preparing the same data", "wait until it has finished")
        time.sleep(0.1)


def _load_record(directory: Path, fingerprint: str) -> DatasetInfo | None:
    """Return the record of an earlier call, None if data or job has changed, or the files are shorter."""
    with suppress(OSError, ValueError, WorkerError):  # a ProtocolError is a ValueError
        info = from_json(DatasetInfo, (directory / RECORD).read_text())
        sizes = [(directory / name).stat().st_size for name in ARRAYS]
        if info.fingerprint == fingerprint and all(map(operator.ge, sizes, _valid_bytes(info))):
            return info
    return None
