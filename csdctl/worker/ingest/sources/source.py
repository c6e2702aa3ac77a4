"""Source files and samples: the tree of files, limits, the interface of a source, parallel decoding."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.process.errors import WorkerError


@dataclass(frozen=True)
class IngestLimits:
    """Block sizes, and intervals between syncs; the prepared bytes do not depend on them."""

    block_samples: int = 256
    block_bytes: int = 32 << 20
    """Memory that a block may take: for encoded samples, and again for decoded ones."""
    sync_interval_s: float = 5.0
    """Upper limit of the work that is repeated after an interruption."""
    lock_deadline_s: float = 10.0
    """How long to wait for a worker that has the lock; one whose csdctl was killed takes a moment to exit."""


DEFAULT_LIMITS = IngestLimits()


IGNORED = ("lost+found",)
"""Directories that a file system creates in its own root; names that begin with a dot are ignored too."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file below a root."""

    parts: tuple[str, ...]
    size: int
    mtime_ns: int

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.parts[-1]


@dataclass(frozen=True)
class Tree:
    """Files below `root`, sorted. If the root itself is a file, it is the only one and has no parts."""

    root: Path
    files: tuple[DataFile, ...]
    folders: tuple[str, ...]
    """Names of the folders directly below the root."""

    def path_of(self, file: DataFile) -> Path:
        """Return the path of `file`."""
        return self.root.joinpath(*file.parts)

    def fingerprint(self, settings: str) -> str:
        """Return a hash that changes with `settings` and whenever a file is added, removed or modified."""
        digest = hashlib.sha256(f"4\0{settings}\0".encode() + os.fsencode(self.root.resolve()))
        for file in self.files:
            digest.update(b"\0".join(os.fsencode(part) for part in file.parts))
            digest.update(f"\0\0{file.size}\0{file.mtime_ns}\n".encode())
        return digest.hexdigest()[:32]


def read_tree(source: str) -> Tree:
    """List the files at `source`, a path as written in the job.

    Raises WorkerError, exit code 2, if nothing exists there, or a link leads out of it or to a directory.
    """
    try:
        root = Path(source).expanduser()
    except RuntimeError:
        raise WorkerError(f"there is no home directory for {source}", exit_code=2) from None
    try:
        if not root.exists():
            raise WorkerError(f"there is no data at {source}", remedy="fix the path in job.yaml", exit_code=2)
        if root.is_file():
            status = root.stat()
            return Tree(root, (DataFile((), status.st_size, status.st_mtime_ns),), ())
        within = os.path.join(os.path.realpath(root), "")
        files = tuple(_walk(root, (), within, source))
        folders = tuple(entry.name for entry in _entries(root) if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise WorkerError(
            f"data at {source} cannot be read: {error.strerror}",
            remedy="fix its path or its permissions",
            exit_code=2,
        ) from None
    return Tree(root, files, folders)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as found:
        kept = [entry for entry in found if not entry.name.startswith(".") and entry.name not in IGNORED]
    return sorted(kept, key=lambda entry: os.fsencode(entry.name))


def _walk(directory: Path, parts: tuple[str, ...], within: str, source: str) -> Iterator[DataFile]:
    for entry in _entries(directory):
        here = (*parts, entry.name)
        if entry.is_symlink():
            _check_link(entry, within, source)
        elif entry.is_dir():
            yield from _walk(directory / entry.name, here, within, source)
            continue
        if entry.is_file():
            status = entry.stat()
            yield DataFile(here, status.st_size, status.st_mtime_ns)
        elif entry.is_symlink():  # dangling, which is detected and counted when it is read
            yield DataFile(here, 0, 0)


def _check_link(entry: os.DirEntry[str], within: str, source: str) -> None:
    """Raise WorkerError unless a link points to a file below the same root."""
    if not os.path.realpath(entry.path).startswith(within):
        raise WorkerError(
            f"data at {source} has a link that leads out of it",
            remedy="replace the link with the file itself, or remove it",
            exit_code=2,
        )
    if entry.is_dir():
        raise WorkerError(
            f"data at {source} has a link to a directory",
            remedy="replace the link with the directory itself, or remove it",
            exit_code=2,
        )


class UnusableError(Exception):
    """A sample cannot be used; it is skipped and counted under `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Block:
    """Consecutive samples: of `num_read` processed ones, samples (n, …) and labels (n, …) are usable."""

    num_read: int
    samples: Array
    labels: Array
    skipped: Counter[str] = field(default_factory=Counter)


class SampleSource(Protocol):
    """Samples in an order that is determined by the source's files and the job alone."""

    num_samples: int
    """Samples to process; 0 if unknown in advance."""
    sample_bytes: int
    """Bytes of one prepared sample; 0 if unknown in advance."""
    class_names: tuple[str, ...] | None
    files_of_class: tuple[int, ...]
    """Number of files of each class; empty for sources without class folders."""
    padded: dict[str, tuple[int, ...]]
    """Inputs and outputs that were padded, and their shape; complete after `blocks`."""

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all samples from index `start` on."""


@dataclass(frozen=True)
class EncodedSample:
    """A sample before decoding: a file, bytes, an array, or None if it could not be read."""

    content: Any
    label: Any

    @property
    def held_bytes(self) -> int:
        """Memory that the encoded sample takes."""
        return getattr(self.content, "nbytes", 0) or (
            len(self.content) if isinstance(self.content, bytes) else 0
        )


def num_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def decode_blocks(
    candidates: Iterable[EncodedSample],
    decode: Callable[[EncodedSample], tuple[Array, Any]],
    limits: IngestLimits,
    *,
    threads: int,
    sample_bytes: int,
) -> Iterator[Block]:
    """Decode with `threads` threads; samples that raise UnusableError are counted and skipped.

    Samples and their order do not depend on the number of threads.
    """

    def decode_or_reason(candidate: EncodedSample) -> tuple[Array, Any] | str:
        try:
            return decode(candidate)
        except UnusableError as error:
            return error.reason

    max_samples = max(1, min(limits.block_samples, limits.block_bytes // max(1, sample_bytes)))
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        for group in _groups(candidates, max_samples, limits.block_bytes):
            yield _as_block(list(pool.map(decode_or_reason, group)))


def _as_block(outcomes: list[tuple[Array, Any] | str]) -> Block:
    usable = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    skipped = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    if not usable:
        return Block(len(outcomes), np.zeros((0,)), np.zeros((0,)), skipped)
    samples, labels = zip(*usable, strict=True)
    return Block(len(outcomes), np.stack(samples), np.stack(labels), skipped)


def _groups(
    candidates: Iterable[EncodedSample], max_samples: int, max_bytes: int
) -> Iterator[list[EncodedSample]]:
    group: list[EncodedSample] = []
    held_bytes = 0
    for candidate in candidates:
        group.append(candidate)
        held_bytes += candidate.held_bytes
        if len(group) >= max_samples or held_bytes >= max_bytes:
            yield group
            group, held_bytes = [], 0
    if group:
        yield group
