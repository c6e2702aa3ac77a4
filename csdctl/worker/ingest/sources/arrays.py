"""Existing arrays: .npy pairs, .npz archives, pairs of IDX files. Their values stay unchanged."""

import contextlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path

from csdctl.worker.data.arrays import Array, as_labels, as_samples, is_numeric, map_array
from csdctl.worker.ingest.limits import IngestLimits
from csdctl.worker.ingest.sources.rows import IdxFile, InMemoryRows, NpzMember, Rows, as_rows
from csdctl.worker.ingest.sources.source import Block
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import DAMAGED_ARCHIVE
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, PrepareSpec

PAIR_NAMES = (("x", "y"), ("images", "labels"))
LABEL_NAMES = ("y", "labels")


class ArraySource:
    """Rows of samples and rows of labels."""

    files_of_class: tuple[int, ...] = ()

    def __init__(self, samples: Rows, labels: Rows, spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, unless they are samples and their labels."""
        check_arrays(samples, labels, spec.source)
        self.class_names = spec.classes
        self.num_samples = samples.shape[0]
        self.sample_bytes = samples.dtype.itemsize * math.prod(samples.shape[1:])
        self._samples = samples
        self._labels = labels
        self._source = spec.source
        self.padded: dict[str, tuple[int, ...]] = {}

    def blocks(self, start: int, limits: IngestLimits) -> Iterator[Block]:
        """Yield all rows from index `start` on."""
        num_rows = max(1, limits.block_bytes // max(1, self.sample_bytes))
        position = 0
        with convert_read_errors(self._source):
            chunks = zip(self._samples.chunks(num_rows), self._labels.chunks(num_rows), strict=True)
            for samples, labels in chunks:
                num_skipped = min(len(samples), max(0, start - position))
                position += len(samples)
                if num_skipped < len(samples):
                    part = slice(num_skipped, None)
                    yield Block(len(samples[part]), as_samples(samples[part]), as_labels(labels[part]))


def check_arrays(samples: Rows, labels: Rows, source: str) -> None:
    """Raise WorkerError, exit code 2, unless they are samples and their labels."""
    if not samples.shape or not labels.shape:
        raise WorkerError(f"data at {source} is a single number, not an array of samples", exit_code=2)
    if 0 in samples.shape:  # labels without values are those of a loss inside the model
        raise empty_data_error(source)
    if samples.shape[0] != labels.shape[0]:
        raise WorkerError(
            f"data at {source} has {samples.shape[0]} samples but {labels.shape[0]} labels", exit_code=2
        )
    if not all(array.dtype.kind == "b" or is_numeric(array.dtype) for array in (samples, labels)):
        raise WorkerError(
            f"data at {source} is not numeric: {samples.dtype} and {labels.dtype}",
            remedy="turn text into numbers, in a function of your own: data.public.function",
            exit_code=2,
        )


def empty_data_error(source: str) -> WorkerError:
    """Return the error for data without any samples."""
    return WorkerError(
        f"data at {source} is empty", remedy="add samples or remove it from job.yaml", exit_code=2
    )


@contextlib.contextmanager
def convert_read_errors(source: str) -> Iterator[None]:
    """Convert the errors of damaged files to a WorkerError, exit code 2, that names no file."""
    try:
        yield
    except DAMAGED_ARCHIVE as error:
        raise WorkerError(
            f"data at {source} cannot be read: {type(error).__name__}",
            remedy="replace the damaged file",
            exit_code=2,
        ) from None


def open_npy_pair(root: Path, spec: PrepareSpec) -> tuple[Array, Array]:
    """Map and check images.npy and labels.npy in `root`."""
    if not ((root / "images.npy").exists() and (root / "labels.npy").exists()):
        raise WorkerError(
            f"data at {spec.source} lacks one of images.npy and labels.npy",
            remedy="add the missing file",
            exit_code=2,
        )
    with convert_read_errors(spec.source):
        samples, labels = map_array(root / "images.npy"), map_array(root / "labels.npy")
    check_arrays(InMemoryRows(samples), InMemoryRows(labels), spec.source)
    return samples, labels


def open_npy_files(root: Path, spec: PrepareSpec) -> ArraySource:
    """Return images.npy and labels.npy in `root` as a source, for arrays that cannot be used in place."""
    samples, labels = open_npy_pair(root, spec)
    return ArraySource(InMemoryRows(samples), InMemoryRows(labels), spec)


MAX_NAMED = 10
"""Arrays of an .npz that a message lists."""


def open_npz(path: Path, spec: PrepareSpec) -> ArraySource:
    """Return arrays x and y, or images and labels, of an .npz file; or y and an array for each input.

    An array `sample_weight` has the weights. Instead of y, there may be an array for each of several outputs.
    """
    with convert_read_errors(spec.source):
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        inputs, outputs = _choose_arrays(names, spec)
        if inputs and outputs:
            labels: dict[str, Rows] = {name: NpzMember(path, member) for name, member in outputs.items()}
            if SAMPLE_WEIGHT in names:
                labels = {name or LABEL: rows for name, rows in labels.items()}
                labels[SAMPLE_WEIGHT] = _as_weights(NpzMember(path, SAMPLE_WEIGHT), spec)
            samples = {name: NpzMember(path, member) for name, member in inputs.items()}
            return ArraySource(as_rows(samples), as_rows(labels), spec)
    found = "" if spec.is_private else f"; it has {', '.join(names[:MAX_NAMED]) or 'none'}"
    raise WorkerError(
        f"the .npz at {spec.source} has no arrays x and y (or images and labels){found}",
        remedy="name a function that returns them, FILE.py:NAME; "
        "for a model with several inputs: y, and an array for each input under its name",
        exit_code=2,
    )


def _choose_arrays(names: list[str], spec: PrepareSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return the arrays of inputs and of outputs by name, '' for the only one; none if they are not there."""
    for samples, labels in PAIR_NAMES:
        if samples in names and labels in names:
            return {"": samples}, {"": labels}
    found = [name for name in LABEL_NAMES if name in names]
    outputs = {"": found[0]} if len(found) == 1 else {}
    if not found and spec.outputs and set(spec.outputs) <= set(names):
        outputs = {name: name for name in spec.outputs}
    others = {SAMPLE_WEIGHT, *outputs.values()}
    return {name: name for name in sorted(names) if name not in others}, outputs


def _as_weights(rows: NpzMember, spec: PrepareSpec) -> Rows:
    if len(rows.shape) != 1:
        raise WorkerError(
            f"the array {SAMPLE_WEIGHT} of the .npz at {spec.source} has shape {rows.shape}",
            remedy="give it one number for each sample",
            exit_code=2,
        )
    return rows


def open_idx_pair(images: Path, labels: Path, spec: PrepareSpec) -> ArraySource:
    """Return an IDX file of images and one of labels as a source."""
    with convert_read_errors(spec.source):
        return ArraySource(IdxFile(images), IdxFile(labels), spec)
