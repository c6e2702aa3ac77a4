"""`prepare`: turns what people have into a prepared data set, where the data lies.

Private data is prepared on its own node by this code, and only counts, shapes and a fingerprint go back:
messages name classes, and no file below the root.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from csdctl.worker.data.arrays import Array, as_labels
from csdctl.worker.data.element_spec import dtype_to_text
from csdctl.worker.ingest.partial_dataset import Part, PartRecord, count_labels, writing
from csdctl.worker.ingest.sources.arrays import open_npy_pair
from csdctl.worker.ingest.sources.finding import find_kind, open_source, settings_of
from csdctl.worker.ingest.sources.source import SampleSource, num_threads
from csdctl.worker.ingest.sources.tree import Tree, read_tree
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import save_aside
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress, PrepareSpec
from csdctl.worker.protocol.json_codec import from_json, to_json

SYNC_INTERVAL_S = 5.0
"""So much work at the most is done again after an interruption."""

_LABELS_AT_ONCE = 1 << 20


def prepare(
    spec: PrepareSpec,
    *,
    threads: int = 0,
    sync_interval_s: float = SYNC_INTERVAL_S,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> DatasetInfo:
    """Prepare `spec.source` below `spec.store`; done before with the same content: nothing happens.

    `threads` 0 means one for each core. What was interrupted is gone on with. Raises WorkerError: exit code 2
    when the source is missing, empty, of no known format, or does not fit the job; 1 when the disk refuses.
    """
    tree = read_tree(spec.source)
    kind = find_kind(tree, spec)
    fingerprint = tree.fingerprint(settings_of(kind, tree, spec))
    target = Path(spec.store) / fingerprint
    record = target / "dataset.json"
    if record.exists():
        return from_json(DatasetInfo, record.read_text())
    if kind == "npy":
        images, labels = open_npy_pair(tree.root, spec)
        if images.ndim != 3:
            return _use_in_place(tree, images, labels, spec, target)
    source = open_source(kind, tree, spec, threads or num_threads())
    part = Part(_part_directory(tree, spec), fingerprint, len(source.class_names or ()))
    try:
        if record.exists():  # whom we waited for has done it
            part.discard()
            return from_json(DatasetInfo, record.read_text())
        _check_room(source, part.record, spec.store)
        _fill(part, source, sync_interval_s, on_progress)
        info = _describe(part.record, source.class_names, source.files_of_class, spec, str(target))
        part.finish(target, to_json(info))
    except WorkerError:
        part.discard()
        raise
    except BaseException:
        part.close()
        raise
    return info


def _use_in_place(tree: Tree, images: Array, labels: Array, spec: PrepareSpec, target: Path) -> DatasetInfo:
    """The source serves as it is: only its description is written."""
    record = PartRecord(
        target.name,
        len(images),
        len(images),
        images.shape[1:],
        dtype_to_text(images.dtype),
        labels.shape[1:],
        str(as_labels(labels[:0]).dtype),
        class_counts=(0,) * len(spec.classes or ()),
    )
    for start in range(0, len(labels), _LABELS_AT_ONCE):
        record = count_labels(record, as_labels(labels[start : start + _LABELS_AT_ONCE]))
    info = _describe(record, spec.classes, (), spec, str(tree.root))
    aside = _part_directory(tree, spec)
    with writing():
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_aside(aside / "dataset.json", to_json(info))
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
    return info


def _part_directory(tree: Tree, spec: PrepareSpec) -> Path:
    """One for each place, so that what is no longer wanted of it does not stay."""
    place = hashlib.sha256(os.fsencode(tree.root.resolve())).hexdigest()[:32]
    return Path(spec.store) / f".part-{place}"


def _fill(
    part: Part, source: SampleSource, sync_interval_s: float, on_progress: Callable[[PrepareProgress], None]
) -> None:
    def tell() -> None:
        record = part.record
        num_skipped = sum(record.num_skipped.values())
        on_progress(PrepareProgress(record.num_read, source.num_samples, num_skipped))

    tell()
    for block in source.blocks(part.record.num_read):
        part.append(block, sync_interval_s=sync_interval_s)
        tell()


def _check_room(source: SampleSource, record: PartRecord, store: str) -> None:
    """Raise WorkerError before hours of work that could not be kept."""
    needed_bytes = source.sample_bytes * (source.num_samples - record.num_read)
    free_bytes = shutil.disk_usage(store).free
    if needed_bytes > free_bytes:
        raise WorkerError(
            f"prepared data cannot be written: it takes {needed_bytes / 1e9:.1f} GB, "
            f"{free_bytes / 1e9:.1f} GB are free",
            remedy="make room on the disk",
        )


def _describe(
    record: PartRecord,
    class_names: tuple[str, ...] | None,
    files_of_class: tuple[int, ...],
    spec: PrepareSpec,
    path: str,
) -> DatasetInfo:
    """What was prepared; raises WorkerError, exit code 2, when it is nothing or does not fit the classes."""
    names = class_names or ()
    if record.num_samples == 0:
        raise _nothing_usable(record, spec)
    has_numbers = record.label_dtype == "int32" and record.min_label >= 0
    if names and not record.label_shape and not (has_numbers and record.max_label < len(names)):
        raise WorkerError(
            f"data at {spec.source} has labels that are no class: the job has {len(names)} classes, "
            f"so labels are whole numbers from 0 to {len(names) - 1}",
            remedy="mend the labels, or data.classes in job.yaml",
            exit_code=2,
        )
    has_classes = bool(names) and not record.label_shape
    counted = zip(names, record.class_counts, files_of_class, strict=False)
    return DatasetInfo(
        path=path,
        num_samples=record.num_samples,
        sample_shape=record.sample_shape,
        dtype=record.dtype,
        label_shape=record.label_shape,
        max_label=len(names) - 1 if has_classes else record.max_label if has_numbers else -1,
        fingerprint=record.fingerprint,
        num_skipped=record.num_skipped,
        class_counts=dict(zip(names, record.class_counts, strict=True)) if has_classes else {},
        unusable_classes=tuple(name for name, usable, files in counted if files and not usable),
    )


def _nothing_usable(record: PartRecord, spec: PrepareSpec) -> WorkerError:
    kinds = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in record.num_skipped.items())
    return WorkerError(
        f"data at {spec.source} has no sample that can be used" + (f": {kinds}" if kinds else ""),
        remedy="mend the data, or data.image and data.tfrecord in job.yaml",
        exit_code=2,
    )
