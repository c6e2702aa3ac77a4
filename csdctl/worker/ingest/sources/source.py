"""Source files and samples: the tree of files, the interface of a source, parallel decoding, structures.

Structures are what users' Keras code calls (x, y, sample_weight), as one array of samples and one of labels.
They are named as Keras' fit reads them: a dict names inputs and outputs, a tuple or list has them in the
model's order. Several inputs or outputs become the fields of a structured array.
"""

import errno
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array, as_samples, fields_of
from csdctl.worker.data.file_hash import open_regular, remember
from csdctl.worker.process.errors import InputError, WorkerError
from csdctl.worker.protocol.datasets import INPUT, LABEL, OUTPUT, SAMPLE_WEIGHT, PrepareSpec, name_of_position
from csdctl.worker.protocol.file_state import file_state

SAMPLES, LABELS = "samples", "labels"
"""Names of the only input and the only output in messages."""
BLOCK_SAMPLES = 256
BLOCK_BYTES = 32 << 20
"""Memory that a block may take: for encoded samples, and again for decoded ones. The prepared bytes do not
depend on the sizes of blocks."""

IGNORED = {
    *("lost+found", "__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information"),
    *("Thumbs.db", "desktop.ini"),
}
"""What systems and archives add; names that begin with a dot are ignored too."""


EXPECTED = (
    "expected (samples, labels), (samples, labels, weights), or samples alone, as arrays or as a "
    "tf.data.Dataset, a keras.utils.PyDataset, or an iterator of single (sample, label)"
)
_NUMBERS = (
    "turn text into numbers in the function, with keras.layers.TextVectorization or StringLookup, numbers of "
    "several types into one, with astype('float32'), and lists "
    "of different lengths into one array, with keras.utils.pad_sequences"
)
_MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file below a root."""

    parts: tuple[str, ...]
    state: tuple[int, ...]
    """As of `file_state`; of zeros if nothing is there."""

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
            found: object = file.state  # of what is too large, dangling or unreadable
            if file.size <= max_bytes:
                with suppress(OSError, ValueError), open_regular(self.path_of(file)) as opened:
                    found = hashlib.file_digest(opened, "sha256").hexdigest()
            return ascii((file.parts, found))

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
        raise InputError(f"there is no home directory for {source}") from None
    try:
        if not root.exists():
            missing = WorkerError if is_private else InputError
            raise missing(f"there is no data at {source}", "fix the path in job.yaml, or mount its disk")
        if root.is_file():
            return Tree(root, (DataFile((), file_state(root.stat())),), ())
        within = os.path.join(os.path.realpath(root), "")
        files = tuple(_walk(root, (), within, source))
        folders = tuple(entry.name for entry in _entries(root) if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise data_error(source, problem, "fix its path or its permissions") from None
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
            yield DataFile(here, file_state(entry.stat()))
        elif entry.is_symlink():  # dangling, which is detected and counted when it is read
            yield DataFile(here, (0,) * 5)


def _check_link(entry: os.DirEntry[str], within: str, source: str) -> None:
    if not os.path.realpath(entry.path).startswith(within):
        remedy = "replace the link with the file itself, or remove it"
        raise data_error(source, "has a link that leads out of it", remedy)
    if entry.is_dir():
        remedy = "replace the link with the directory itself, or remove it"
        raise data_error(source, "has a link to a directory", remedy)


def data_error(source: str, problem: str, remedy: str = "") -> WorkerError:
    """Return the error for data that cannot be used. It names no file below `source`."""
    return InputError(f"data at {source} {problem}", remedy)


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


class UnusableError(Exception):
    """A sample cannot be used. It is skipped and counted under this reason."""


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
    """Samples in an order that is determined by the source's files and the job alone."""

    num_samples = 0
    sample_bytes = 0
    files_of_class: tuple[int, ...] = ()
    """Number of files of each class; empty for sources without class folders."""
    columns: tuple[str, ...] = ()
    """The columns of a table in the order of a sample's values; empty for private data."""

    def __init__(self, spec: PrepareSpec) -> None:
        self.class_names = spec.classes
        self.padded: dict[str, tuple[int, ...]] = {}
        """Inputs and outputs that were padded, and their shape; complete after `blocks`."""

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield all samples from index `start` on."""
        raise NotImplementedError


def skip_rows(batches: Iterable[tuple[Array, Array]], start: int) -> Iterator[Block]:
    """Yield batches of samples and labels as blocks, from the sample with index `start` on."""
    position = 0
    for samples, labels in batches:
        num_skipped = min(len(samples), max(0, start - position))
        if num_skipped < len(samples):
            yield block_at(position + num_skipped, samples[num_skipped:], labels[num_skipped:])
        position += len(samples)


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

    def __init__(self, spec: PrepareSpec, threads: int) -> None:
        super().__init__(spec)
        self._threads = threads

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
        with ThreadPoolExecutor(self._threads, thread_name_prefix="decode") as pool:
            for group in _groups(candidates, max_samples):
                yield self._as_block(group, start, list(pool.map(self._decode_or_reason, group)))
                start += len(group)

    def _decode_or_reason(self, candidate: Candidate) -> tuple[Array, Any] | str:
        try:
            return self.decode(*candidate)
        except UnusableError as error:
            return str(error)

    def _as_block(self, group: list[Candidate], start: int, found: list[tuple[Array, Any] | str]) -> Block:
        def place_of(number: int) -> str:
            place = self.place_of(group[number], start + number)
            return (place if place.isprintable() else ascii(place))[-250:]

        usable = [number for number, one in enumerate(found) if not isinstance(one, str)]
        skipped = [(one, place_of(number)) for number, one in enumerate(found) if isinstance(one, str)]
        if not usable:
            return Block(np.zeros((0,)), np.zeros((0,)), skipped)
        samples, labels = zip(*(found[number] for number in usable), strict=True)
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


class StructureError(Exception):
    """The result of a function is not samples: a problem, such as 'returned an int', and a remedy."""

    def __init__(self, problem: str, remedy: str = EXPECTED) -> None:
        super().__init__(problem)
        self.remedy = remedy


def name_parts(element: Any, spec: PrepareSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return inputs and outputs, {} without labels, by their names in the model. Raises StructureError."""
    if isinstance(element, Mapping) or getattr(element, "shape", ()) not in ((), None):
        element = (element, None)
    if not (isinstance(element, tuple | list) and len(element) in (2, 3)):
        raise StructureError("yields something that is not (sample, label)")
    samples, labels, weights = (*element, None)[:3]
    return _name_inputs(samples, spec), _name_outputs(labels, weights, spec)


def no_labels(num_samples: tuple[int, ...]) -> Array:
    """Return labels without values, shape (*num_samples, 0)."""
    return np.zeros((*num_samples, 0), np.float32)


def _name_inputs(samples: Any, spec: PrepareSpec) -> dict[str, Any]:
    """Return the parts of `samples` by the names of the model's inputs. '' if there is only one."""
    parts = _parts_of(samples, INPUT)
    known = list(spec.inputs)
    if len(known) == len(parts) == 1 and "" in (*known, *parts):
        return {known[0]: next(iter(parts.values()))}
    if known and set(known) <= set(parts):  # Keras leaves out what the model does not take, too
        return {name: parts[name] for name in known}
    return parts


def _name_outputs(labels: Any, weights: Any, spec: PrepareSpec) -> dict[str, Any]:
    """Return the parts of `labels` by the model's outputs, '' for the only one. The samples' weights last."""
    if labels is None:
        return {}
    parts = _parts_of(labels, OUTPUT)
    if len(parts) == 1 and not (spec.outputs and set(parts) <= set(spec.outputs)):
        parts = {"": next(iter(parts.values()))}
    elif set(parts) <= set(spec.outputs):
        parts = {name: parts[name] for name in spec.outputs if name in parts}
    if SAMPLE_WEIGHT in parts:
        raise StructureError(f"returned an output with the name {SAMPLE_WEIGHT}", "rename the output")
    if weights is None:
        return parts
    weight_parts = _parts_of(weights, OUTPUT)
    if len(weight_parts) > 1:
        remedy = "return one weight for each sample, or weigh losses instead"
        raise StructureError("returned weights for each output", remedy)
    if "" in parts:
        parts = {LABEL: parts[""]}
    return parts | {SAMPLE_WEIGHT: next(iter(weight_parts.values()))}


def _parts_of(structure: Any, kind: str) -> dict[str, Any]:
    if isinstance(structure, Mapping):
        parts = dict(structure)
        good = (name for name in parts if isinstance(name, str) and name.isascii() and name.isprintable())
        if bad := parts.keys() - {name for name in good if 0 < len(name) <= _MAX_NAME}:
            remedy = f"name inputs and outputs with up to {_MAX_NAME} printable ASCII characters"
            raise StructureError(f"returned the name {str(bad.pop())[:_MAX_NAME]!r}", remedy)
    elif isinstance(structure, tuple | list) and structure and all(map(_is_part, structure)):
        parts = {name_of_position(kind, number): part for number, part in enumerate(structure)}
        if len(parts) == 1:
            parts = {"": structure[0]}
    else:
        parts = {"": structure}
    if not parts or any(isinstance(part, Mapping) for part in parts.values()):
        remedy = "give each input and output one array, under its own name"
        raise StructureError("returned nested structures", remedy)
    return parts


def _is_part(value: Any) -> bool:
    """Return whether an item of a tuple is an input or output. Numbers make up a list of numbers."""
    return (hasattr(value, "shape") and not isinstance(value, np.generic)) or isinstance(value, Mapping)


def to_array(part: Any, name: str) -> Array:
    """Return an array or tensor as an array of numbers, ragged ones padded with 0. Raises StructureError."""
    where = f" as {name}" if name else ""
    if hasattr(part, "to_tensor"):
        part = part.to_tensor()
    elif hasattr(part, "dense_shape"):
        part = sys.modules["tensorflow"].sparse.to_dense(part)
    elif hasattr(part, "toarray"):
        part = part.toarray()
    if np.ma.is_masked(part):
        raise StructureError(f"returned a masked array{where}", "replace masked values: array.filled(0)")
    try:
        array = np.asarray(part)
    except (TypeError, ValueError):
        raise StructureError(f"returned lists of different lengths{where}", _NUMBERS) from None
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.dtype.kind in "OSU":
        raise StructureError(f"returned text or Python objects{where}", _NUMBERS)
    if array.dtype.kind not in "uifb":
        raise StructureError(f"returned values of type {array.dtype}{where}", "convert them to numbers")
    return array


def to_arrays(parts: Mapping[str, Any], num_axes: int) -> dict[str, Array]:
    """Return parts as arrays of numbers, 1 axis of several samples or 0. Raises StructureError."""
    arrays = {name: to_array(part, name) for name, part in parts.items()}
    if SAMPLE_WEIGHT in arrays:
        weights = arrays[SAMPLE_WEIGHT]
        if weights.ndim == num_axes + 1 and weights.shape[-1] == 1:
            weights = weights[..., 0]
        if weights.ndim < num_axes:
            remedy = "return weights of shape (n,), or with further axes of the labels, such as (n, steps)"
            raise StructureError("returned a single weight for all samples", remedy)
        arrays[SAMPLE_WEIGHT] = weights.astype(np.float32, copy=False)
    return arrays


def to_records(arrays: Mapping[str, Array], num_axes: int) -> Array:
    """Return several arrays as the fields of one, and the only array as it is. Raises StructureError."""
    if list(arrays) == [""]:
        return arrays[""]
    if len({array.shape[:num_axes] for array in arrays.values()}) != 1:
        listed = ", ".join(f"{name} {array.shape[:1]}" for name, array in arrays.items())
        raise StructureError(f"returned arrays of different lengths: {listed}")
    dtype = np.dtype([(name, array.dtype, array.shape[num_axes:]) for name, array in arrays.items()])
    records = np.empty(next(iter(arrays.values())).shape[:num_axes], dtype)
    for name, array in arrays.items():
        records[name] = array
    return records


def conform(block: Block, spec: PrepareSpec) -> Block:
    """Return a block in the types that are stored, and with what the job's model and public data have.

    Grey images of a model that takes (h, w, 1) get an axis of channels. Samples without weights get 1. Raises
    WorkerError, exit code 2, for NaN, infinity, and values that the types do not hold.
    """
    samples, labels = block.samples, fields_of(block.labels)
    if takes_grey(spec) and samples.dtype.names is None and samples.ndim == 3:
        samples = samples[..., np.newaxis]
    if SAMPLE_WEIGHT in spec.labels and SAMPLE_WEIGHT not in labels:
        shape = (len(samples), *spec.labels[SAMPLE_WEIGHT][1])
        labels = {name or LABEL: field for name, field in labels.items()}
        labels[SAMPLE_WEIGHT] = np.ones(shape, np.float32)
    with np.errstate(over="ignore"):
        stored = {name: _store_label(name, field, spec) for name, field in labels.items()}
        found = replace(block, samples=as_samples(samples), labels=to_records(stored, 1))
    _check_finite(SAMPLES, fields_of(samples), fields_of(found.samples), block, spec)
    _check_finite(LABELS, labels, stored, block, spec)
    return found


def _store_label(name: str, field: Array, spec: PrepareSpec) -> Array:
    """Return labels as int32, or float32 as the public data's, or wide integers of a regression."""
    is_value = spec.is_regression and not spec.classes and not np.can_cast(field.dtype, np.int32)
    dtype, _ = spec.labels.get(name, ("float32" if is_value else "int32", ()))
    if field.dtype.kind not in "iu" or name == SAMPLE_WEIGHT or dtype == "float32":
        return field.astype(np.float32, copy=False)
    if field.size and max(-int(field.min()), int(field.max())) >= 1 << 31:
        problem = f"has integers beyond ±2³¹ in {name or LABELS}, which are kept as int32"
        remedy = "number classes from 0; return other values as float32, from a function of your own"
        raise data_error(spec.source, problem, remedy)
    return field.astype(np.int32, copy=False)


def _check_finite(
    what: str, given: Mapping[str, Array], stored: Mapping[str, Array], block: Block, spec: PrepareSpec
) -> None:
    """Raise WorkerError, exit code 2, if stored values are NaN or infinite."""
    for name, field in stored.items():
        if field.dtype.kind != "f" or (spec.allows_nan and name != SAMPLE_WEIGHT) or np.isfinite(field).all():
            continue
        row = int(np.argmin(np.isfinite(field.reshape(len(field), -1)).all(axis=1)))
        place = block.place_of(row)
        where = f"{name or what}, {place.rpartition(', ')[2] if spec.is_private else place} (counted from 0)"
        if np.isfinite(given[name][row]).all():
            raise data_error(spec.source, f"has values beyond the range of float32 in {where}", "scale them")
        remedy = "remove or replace them"
        if name != SAMPLE_WEIGHT:
            remedy += "; if the model or its loss expects them, set data.allow_nan: true in job.yaml"
        raise data_error(spec.source, f"has NaN or infinity in {where}", remedy)


def takes_grey(spec: PrepareSpec) -> bool:
    """Return whether the model takes pictures of one channel."""
    shape = spec.inputs.get("", ())
    return len(shape) == 3 and shape[2] == 1
