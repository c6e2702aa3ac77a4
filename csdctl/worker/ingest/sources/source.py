"""Source files and samples: the tree of files, the interface of a source, parallel decoding."""

import csv
import errno
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import OBJECTS, Array
from csdctl.worker.data.file_hash import open_regular, remember
from csdctl.worker.process.errors import JobError, WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec
from csdctl.worker.protocol.disk_errors import DAMAGED_ARCHIVE
from csdctl.worker.protocol.file_state import file_state

BLOCK_SAMPLES = 256
BLOCK_BYTES = 32 << 20
"""Memory that a block may take: for encoded samples, and again for decoded ones. The prepared bytes do not
depend on the sizes of blocks."""
MAX_PLACE = 250
"""Characters of the place of a sample, of which the last ones say most."""

IGNORED = {
    *("lost+found", "__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information"),
    *("Thumbs.db", "desktop.ini"),
}
"""What systems and archives add; names that begin with a dot are ignored too."""

DAMAGED: tuple[type[Exception], ...] = (*DAMAGED_ARCHIVE, csv.Error)
"""The errors of files that are damaged."""
EXPECTED = (
    "expected (samples, labels), (samples, labels, weights), or samples alone, as arrays or as a "
    "tf.data.Dataset, a keras.utils.PyDataset, or an iterator of single (sample, label)"
)


GIVE_ONE_SHAPE = (
    "give all samples one shape and type: pad sequences in your function, with keras.utils.pad_sequences or "
    "padded_batch(…, padded_shapes=…)"
)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file below a root."""

    parts: tuple[str, ...]
    state: tuple[int, ...]
    """See `file_state`; of zeros if nothing is there."""

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.state[2]


@dataclass(frozen=True)
class Tree:
    """Files below `root`, sorted. If the root itself is a file, it is the only one and has no parts."""

    root: Path
    files: tuple[DataFile, ...]
    folders: tuple[str, ...]

    def path_of(self, file: DataFile) -> Path:
        """Return the path of `file`."""
        return self.root.joinpath(*file.parts)

    def fingerprint(self, settings: str, max_bytes: int) -> str:
        """Return a hash of `settings`, root, names and content. Of files above `max_bytes`, the state."""
        root = self.root.resolve()
        states = hashlib.sha256(ascii((max_bytes, self.files)).encode()).hexdigest()
        newest_ns = max((file.state[-1] for file in self.files), default=0)
        content = remember(f"tree {root}", [states], newest_ns, lambda: self._hash_files(max_bytes))
        return hashlib.sha256(f"8\0{settings}\0{content}\0".encode() + os.fsencode(root)).hexdigest()[:32]

    def _hash_files(self, max_bytes: int) -> str:
        def describe(file: DataFile) -> str:
            content: object = file.state  # of what is too large, dangling or unreadable
            if file.size <= max_bytes:
                with suppress(OSError, ValueError), open_regular(self.path_of(file)) as opened:
                    content = hashlib.file_digest(opened, "sha256").hexdigest()
            return ascii((file.parts, content))

        described: list[str] = []
        with ThreadPoolExecutor(num_threads(), thread_name_prefix="hash") as pool:
            for start in range(0, len(self.files), BLOCK_SAMPLES):
                described += pool.map(describe, self.files[start : start + BLOCK_SAMPLES])
        return hashlib.sha256("".join(described).encode()).hexdigest()


def read_tree(source: str, *, is_private: bool = False) -> Tree:
    """List the files at `source`. Raises WorkerError, exit code 2, or 1 for missing private data."""
    try:
        root = Path.home() / Path(source).expanduser()
    except RuntimeError:
        raise JobError(f"there is no home directory for {source}") from None
    try:
        if not root.exists():
            missing = WorkerError if is_private else JobError
            raise missing(f"there is no data at {source}", "fix the path in job.yaml, or mount its disk")
        if root.is_file():
            return Tree(root, (DataFile((), file_state(root.stat())),), ())
        within = os.path.join(os.path.realpath(root), "")
        files = tuple(_walk(root, (), within, source))
        folders = tuple(entry.name for entry in _entries(root) if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        is_other = isinstance(error, NotADirectoryError)
        problem = "is neither a file nor a directory" if is_other else f"cannot be read: {error.strerror}"
        raise data_error(source, problem, "fix its path or its permissions") from None
    return Tree(root, files, folders)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        kept = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in IGNORED]
    return sorted(kept, key=lambda entry: os.fsencode(entry.name))


def _walk(directory: Path, parts: tuple[str, ...], within: str, source: str) -> Iterator[DataFile]:
    for entry in _entries(directory):
        here = (*parts, entry.name)
        if entry.is_symlink():
            if not os.path.realpath(entry.path).startswith(within):
                remedy = "replace the link with the file itself, or remove it"
                raise data_error(source, "has a link that leads out of it", remedy)
            if entry.is_dir():
                remedy = "replace the link with the directory itself, or remove it"
                raise data_error(source, "has a link to a directory", remedy)
        elif entry.is_dir():
            yield from _walk(directory / entry.name, here, within, source)
        if entry.is_file():
            yield DataFile(here, file_state(entry.stat()))
        elif entry.is_symlink():  # dangling, which is detected and counted when it is read
            yield DataFile(here, (0,) * 5)


def data_error(source: str, problem: str, remedy: str = "") -> WorkerError:
    """Return the error for data that cannot be used. It names no file below `source`."""
    return JobError(f"data at {source} {problem}", remedy)


def empty_data_error(source: str) -> WorkerError:
    """Return the error for data without any samples."""
    return data_error(source, "is empty", "add samples or remove it from job.yaml")


@contextmanager
def convert_read_errors(source: str, *, is_text: bool = False) -> Iterator[None]:
    """Convert the errors of damaged files to a WorkerError, exit code 2, that names no file."""
    try:
        yield
    except DAMAGED as error:
        if is_text and isinstance(error, UnicodeDecodeError):
            raise data_error(source, "is not text in UTF-8", "save it as CSV in UTF-8") from None
        reason, remedy = type(error).__name__, "replace the damaged file"
        if str(error) == OBJECTS:
            reason, remedy = OBJECTS, "save it with a type of numbers: array.astype(np.float32)"
        raise data_error(source, f"cannot be read: {reason}", remedy) from None


@contextmanager
def convert_write_errors() -> Iterator[None]:
    """Convert errors of the disk to a WorkerError that names no file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "not enough disk space"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
        remedy = "free disk space" if is_full else "fix the disk or its permissions"
        raise WorkerError(f"prepared data cannot be written: {reason}", remedy=remedy) from None


class UnusableError(Exception):
    """A sample cannot be used. It is skipped and counted under this reason."""


class StructureError(Exception):
    """The result of a function is not samples: a problem, such as 'returned an int', and a remedy."""

    def __init__(self, problem: str, remedy: str = EXPECTED) -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True)
class Block:
    """Consecutive samples (n, …) and their labels (n, …)."""

    samples: Array
    labels: Array
    skipped: Sequence[tuple[str, str]] = ()
    """Reason and place of each sample among them that was skipped."""
    place_of: Callable[[int], str] = "sample {}".format
    """Returns where the sample with this index is in the source; a file comes first, before a comma."""


class SampleSource:
    """Samples in an order that is determined by only the source's files and the job."""

    num_samples = 0
    sample_bytes = 0
    files_of_class: tuple[int, ...] = ()
    """Number of files of each class; empty for sources without class folders."""
    columns: tuple[str, ...] = ()
    """The columns of a table in the order of a sample's values; empty for private data."""

    def __init__(self, spec: PrepareSpec) -> None:
        self.class_names = spec.classes

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield all samples from index `start` on."""
        raise NotImplementedError


def block_at(start: int, samples: Array, labels: Array) -> Block:
    """Return rows of arrays, from index `start` on, as a block."""
    return Block(samples, labels, place_of=lambda row: f"row {start + row}")


Candidate = tuple[Any, Any]
"""A sample before decoding (a file, bytes, an array, or None if it could not be read), and its label."""


def num_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class DecodedSource(SampleSource):
    """Samples that are decoded one by one, in threads, in order. Unusable ones are counted and skipped."""

    def candidates(self) -> Iterator[Candidate]:
        """Yield all samples."""
        raise NotImplementedError

    def decode(self, content: Any, label: Any) -> tuple[Array, Any]:
        """Return sample and label. Raises UnusableError."""
        raise NotImplementedError

    def place_of(self, candidate: Candidate, number: int) -> str:
        """Return where a candidate is in the source, given its number."""
        return f"sample {number}"

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield all samples from index `start` on."""
        max_samples = max(1, min(BLOCK_SAMPLES, BLOCK_BYTES // max(1, self.sample_bytes)))
        candidates = itertools.islice(self.candidates(), start, None)
        with ThreadPoolExecutor(num_threads(), thread_name_prefix="decode") as pool:
            for group in _groups(candidates, max_samples):
                yield self._as_block(group, start, list(pool.map(self._decode_or_reason, group)))
                start += len(group)

    def _decode_or_reason(self, candidate: Candidate) -> tuple[Array, Any] | str:
        try:
            return self.decode(*candidate)
        except UnusableError as error:
            return str(error)

    def _as_block(self, group: list[Candidate], start: int, results: list[tuple[Array, Any] | str]) -> Block:
        def place_of(number: int) -> str:
            place = self.place_of(group[number], start + number)
            return (place if place.isprintable() else ascii(place))[-MAX_PLACE:]

        skipped, usable, pairs = [], [], []
        for number, result in enumerate(results):
            if isinstance(result, str):
                skipped.append((result, place_of(number)))
            else:
                usable.append(number)
                pairs.append(result)
        if not pairs:
            return Block(np.zeros((0,)), np.zeros((0,)), skipped)
        samples, labels = zip(*pairs, strict=True)
        return Block(np.stack(samples), np.stack(labels), skipped, lambda row: place_of(usable[row]))


def _groups(candidates: Iterable[Candidate], max_samples: int) -> Iterator[list[Candidate]]:
    group: list[Candidate] = []
    held_bytes = 0
    for candidate in candidates:
        group.append(candidate)
        content = candidate[0]
        held_bytes += len(content) if isinstance(content, bytes) else getattr(content, "nbytes", 0)
        if len(group) >= max_samples or held_bytes >= BLOCK_BYTES:
            yield group
            group, held_bytes = [], 0
    if group:
        yield group


def to_records(arrays: Mapping[str, Array], num_axes: int) -> Array:
    """Return several arrays as the fields of one, and the only array as it is. Raises StructureError."""
    if list(arrays) == [""]:
        return arrays[""]
    shapes = {array.shape[:num_axes] for array in arrays.values()}
    if len(shapes) != 1:
        listed = ", ".join(f"{name} {array.shape[:1]}" for name, array in arrays.items())
        raise StructureError(f"returned arrays of different lengths: {listed}")
    dtype = np.dtype([(name, array.dtype, array.shape[num_axes:]) for name, array in arrays.items()])
    records = np.empty(shapes.pop(), dtype)
    for name, array in arrays.items():
        records[name] = array
    return records
