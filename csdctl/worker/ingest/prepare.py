"""`prepare`: converts a user's data into a prepared data set, on the machine that has the data.

Private data is prepared on its own node by this code, and only counts, shapes and a fingerprint are returned:
messages may name classes, but no file below the root.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array, as_labels, fields_of, label_dtype
from csdctl.worker.data.element_spec import dtype_to_text
from csdctl.worker.data.file_hash import open_regular
from csdctl.worker.ingest.partial_dataset import (
    PRIVATE_DIRECTORY,
    IngestRecord,
    PartialDataset,
    check_free_space,
    convert_write_errors,
    count_labels,
    count_values,
    hash_arrays,
    is_open_to_change,
    make_store,
    set_access,
)
from csdctl.worker.ingest.sources.arrays import open_npy_pair
from csdctl.worker.ingest.sources.detect import detect_format, fingerprint_settings, open_source
from csdctl.worker.ingest.sources.source import (
    DEFAULT_LIMITS,
    Block,
    IngestLimits,
    SampleSource,
    Tree,
    num_threads,
    read_tree,
)
from csdctl.worker.ingest.sources.structure import conform
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import save_atomically
from csdctl.worker.protocol.datasets import LABEL, DatasetInfo, PrepareProgress, PrepareSpec, parts_of
from csdctl.worker.protocol.json_codec import from_json, to_json

_LABELS_AT_ONCE = 1 << 20
_MAX_DESCRIPTION_BYTES = 16 << 20


def prepare(
    spec: PrepareSpec,
    *,
    threads: int = 0,
    limits: IngestLimits = DEFAULT_LIMITS,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> DatasetInfo:
    """Prepare `spec.source` below `spec.store`; do nothing if the same content has been prepared before.

    `threads` 0 means one per core. An interrupted call is resumed. Raises WorkerError: exit code 2 if the
    source is missing, empty, in an unsupported format, or does not fit the job; 1 if the disk fails.
    """
    tree = read_tree(spec.source)
    source_format = detect_format(tree, spec)
    fingerprint = tree.fingerprint(fingerprint_settings(source_format, tree, spec))
    target = Path(spec.store) / fingerprint
    with convert_write_errors():
        make_store(Path(spec.store), tree.root, is_shared=spec.is_shared)
    if done := _find_prepared(target, tree, spec):
        set_access(target, tree, is_shared=spec.is_shared)
        return done
    if source_format == "npy":
        samples, labels = open_npy_pair(tree.root, spec)
        if _is_as_stored(samples, labels, spec):
            return _use_in_place(tree, samples, labels, spec, target, limits)
    source = open_source(source_format, tree, spec, threads or num_threads())
    directory = _partial_directory(tree, spec)
    with PartialDataset(directory, fingerprint, len(source.class_names or ()), limits) as partial:
        if done := _find_prepared(target, tree, spec):  # by the process that held the lock
            partial.discard()
            return done
        num_left = source.num_samples - partial.record.num_read
        check_free_space(source.sample_bytes * num_left, spec.store, "prepared data")
        fill(partial, source, spec, limits, on_progress)
        info = describe(
            partial.record, source.class_names, source.files_of_class, spec, str(target), source.padded
        )
        finished = partial.finish(target, info)
        set_access(target, tree, is_shared=spec.is_shared)
        return finished


def _find_prepared(target: Path, tree: Tree, spec: PrepareSpec) -> DatasetInfo | None:
    """Return the description of data that was prepared before; None if it is missing, damaged or edited.

    Data that another user could change is prepared again.
    """
    try:
        if is_open_to_change(target):
            return None
        with open_regular(target / "dataset.json") as file:
            info = from_json(DatasetInfo, file.read(_MAX_DESCRIPTION_BYTES).decode())
        if info.fingerprint != target.name or info.path not in (str(target), str(tree.root)):
            return None
        if spec.is_checked and hash_arrays(info, Path(info.path)) != info:
            return None
    except (OSError, ValueError, RecursionError, WorkerError):  # a ProtocolError is a ValueError
        return None
    return info if info.images_sha256 and info.labels_sha256 and info.label_dtype else None


def _is_as_stored(samples: Array, labels: Array, spec: PrepareSpec) -> bool:
    """Return whether samples and labels need no conversion but that of labels when they are read."""
    stored = conform(Block(0, samples[:0], labels[:0]), spec)
    is_same_type = bool(stored.samples.dtype == samples.dtype)
    has_same_fields = stored.labels.dtype == label_dtype(labels.dtype)
    return is_same_type and has_same_fields and stored.samples.shape[1:] == samples.shape[1:]


def _use_in_place(
    tree: Tree, samples: Array, labels: Array, spec: PrepareSpec, target: Path, limits: IngestLimits
) -> DatasetInfo:
    """Describe a source that can be read as it is; nothing is copied."""
    record = IngestRecord(
        fingerprint=target.name,
        num_read=len(samples),
        num_samples=len(samples),
        sample_shape=samples.shape[1:],
        dtype=dtype_to_text(samples.dtype),
        label_shape=labels.shape[1:],
        label_dtype=dtype_to_text(label_dtype(labels.dtype)),
        class_counts=(0,) * len(spec.classes or ()),
    )
    for start in range(0, len(labels), _LABELS_AT_ONCE):
        record = count_labels(record, as_labels(labels[start : start + _LABELS_AT_ONCE]))
    num_rows = max(1, limits.block_bytes // max(1, samples.dtype.itemsize * math.prod(samples.shape[1:])))
    if samples.dtype != np.uint8 and any(field.dtype.kind in "iu" for field in fields_of(samples).values()):
        for start in range(0, len(samples), num_rows):
            record = count_values(record, samples[start : start + num_rows])
    info = hash_arrays(describe(record, spec.classes, (), spec, str(tree.root), {}), tree.root)
    aside = _partial_directory(tree, spec)
    with convert_write_errors():
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=PRIVATE_DIRECTORY)
        save_atomically(aside / "dataset.json", to_json(info))
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        set_access(target, tree, is_shared=spec.is_shared)
    return info


def _partial_directory(tree: Tree, spec: PrepareSpec) -> Path:
    """Return the directory for unfinished work: one for each source, so that an outdated one is replaced."""
    place = hashlib.sha256(os.fsencode(tree.root.resolve())).hexdigest()[:32]
    return Path(spec.store) / f".part-{place}"


def fill(
    partial: PartialDataset,
    source: SampleSource,
    spec: PrepareSpec,
    limits: IngestLimits,
    on_progress: Callable[[PrepareProgress], None],
) -> None:
    """Append the samples of `source` that `partial` does not have yet."""

    def report() -> None:
        record = partial.record
        num_skipped = sum(record.num_skipped.values())
        on_progress(PrepareProgress(record.num_read, source.num_samples, num_skipped))

    report()
    for block in source.blocks(partial.record.num_read, limits):
        partial.append(conform(block, spec))
        report()


def describe(
    record: IngestRecord,
    class_names: tuple[str, ...] | None,
    files_of_class: tuple[int, ...],
    spec: PrepareSpec,
    path: str,
    padded: dict[str, tuple[int, ...]],
) -> DatasetInfo:
    """Return the description; raises WorkerError, exit code 2, if it is empty or does not fit the classes."""
    names = class_names or ()
    if record.num_samples == 0:
        raise _no_usable_samples(record, spec)
    largest = {
        name: value if record.min_labels[name] >= 0 else -1 for name, value in record.max_labels.items()
    }
    parts = parts_of(record.label_dtype, record.label_shape)
    field = LABEL if LABEL in parts else ""
    has_classes = bool(names) and field in parts and not parts[field][1]
    if has_classes and not 0 <= largest.get(field, -1) < len(names):
        raise WorkerError(
            f"data at {spec.source} has labels that are not classes: the job has {len(names)} classes, "
            f"so labels must be integers from 0 to {len(names) - 1}",
            remedy="fix the labels, or data.classes in job.yaml",
            exit_code=2,
        )
    if has_classes:
        largest[field] = len(names) - 1
    counted = zip(names, record.class_counts, files_of_class, strict=False)
    return DatasetInfo(
        path=path,
        num_samples=record.num_samples,
        sample_shape=record.sample_shape,
        dtype=record.dtype,
        label_shape=record.label_shape,
        max_label=largest.get(field, -1),
        fingerprint=record.fingerprint,
        num_skipped=record.num_skipped,
        class_counts=dict(zip(names, record.class_counts, strict=True)) if has_classes else {},
        unusable_classes=tuple(name for name, usable, files in counted if files and not usable),
        label_dtype=record.label_dtype,
        max_labels=largest,
        max_values=record.max_values,
        padded=padded,
    )


def _no_usable_samples(record: IngestRecord, spec: PrepareSpec) -> WorkerError:
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in record.num_skipped.items())
    # Text, audio or arrays in class folders: nothing in job.yaml makes csdctl read them.
    is_all_other = set(record.num_skipped) == {"other_format"}
    return WorkerError(
        f"data at {spec.source} has no usable samples" + (f": {reasons}" if reasons else ""),
        remedy="its files are no PNG, JPEG, BMP or GIF: let a function of yours read them "
        "(docs/how-to/prepare-data.md, `Your own function`)"
        if is_all_other
        else "fix the data, or data.image and data.tfrecord in job.yaml",
        exit_code=2,
    )
