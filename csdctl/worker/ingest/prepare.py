"""`prepare`: converts a user's data into a prepared data set, on the machine that has the data, and `look`.

Of private data, only counts, shapes and a fingerprint are returned: messages may name classes, but no file
below the root. `look` says what a data set of the host is like, and keeps nothing.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array, as_samples, fields_of, is_numeric, label_dtype
from csdctl.worker.ingest import partial_dataset
from csdctl.worker.ingest.partial_dataset import PartialDataset
from csdctl.worker.ingest.sources import arrays as array_files
from csdctl.worker.ingest.sources import source as sources
from csdctl.worker.ingest.sources.arrays import ArraySource
from csdctl.worker.ingest.sources.function import ENDING, call_function
from csdctl.worker.ingest.sources.images import ClassFolders, open_image, upright_size
from csdctl.worker.ingest.sources.source import Block, SampleSource, Tree, data_error, read_tree
from csdctl.worker.ingest.sources.tfrecord import RecordFiles, is_record_file
from csdctl.worker.process.errors import JobError, WorkerError
from csdctl.worker.protocol import datasets as protocol
from csdctl.worker.protocol.datasets import LABEL, SAMPLE_WEIGHT, DatasetInfo, PrepareProgress, PrepareSpec

SAMPLES, LABELS = "samples", "labels"
"""Names of the only input and the only output in messages."""
NPY, NPZ, CSV, TFRECORD = "npy", "npz", "csv", "tfrecord"
FOLDERS, FUNCTION = "class folders", "function"
"""The formats of data."""
SUPPORTED_DATA = (
    "folders named by class that contain PNG, JPEG, BMP or GIF images, TFRecord files, images.npy and "
    "labels.npy, one .npz file with x and y, or .csv files"
)
MAX_PICTURES = 512
MAX_BYTES = 64 << 20
"""Pictures, and bytes of other samples, that `look` reads."""
LABEL_COLUMNS = ("label", "labels", "target", "targets", "y", "class", "outcome", "category")
"""Names of a table's column that is its label."""

Open = Callable[[Tree, PrepareSpec], SampleSource]
"""Opens the files of a tree; raises WorkerError, exit code 2."""


def detect_format(tree: Tree, spec: PrepareSpec) -> tuple[str, Open]:
    """Return the name of the format, and what opens it. Raises WorkerError, exit code 2."""
    if spec.function:
        return FUNCTION, call_function
    if not tree.files and not tree.folders:
        raise sources.empty_data_error(spec.source)
    top = [file for file in tree.files if len(file.parts) < 2]
    paths = [tree.path_of(file) for file in top]
    if {"images.npy", "labels.npy"} & {
        path.name for file, path in zip(top, paths, strict=True) if file.parts
    }:
        return NPY, array_files.open_npy_files
    archives = [path for path in paths if path.suffix.lower() == ".npz"]
    if len(archives) == 1:
        return NPZ, lambda tree, spec: array_files.open_npz(archives[0], spec)
    if top and all(
        array_files.is_table(file, tree) for file in (tree.files if spec.table or tree.folders else top)
    ):
        return CSV, array_files.open_table
    record_files = [file for file in tree.files if is_record_file(file, tree)]
    if any(file in record_files for file in top) or (record_files and spec.records):
        return TFRECORD, RecordFiles
    if tree.folders:
        return FOLDERS, ClassFolders
    raise data_error(spec.source, "is not in a supported format", f"expected {SUPPORTED_DATA}")


def fingerprint_settings(source_format: str, tree: Tree, spec: PrepareSpec) -> str:
    """Return, as text, everything besides the files that determines the prepared bytes."""
    names = ["classes", "is_regression", "allows_nan", "outputs"]
    names += {
        NPZ: ["inputs", "table"],
        CSV: ["inputs", "table", "columns"],
        TFRECORD: ["picture", "records"],
        FOLDERS: ["picture"],
        FUNCTION: ["picture", "inputs", "table", "labels"],
    }.get(source_format, [])
    values = asdict(spec)
    settings: dict[str, object] = {"kind": source_format} | {name: values[name] for name in names}
    if source_format == FOLDERS:
        settings["folders"] = tree.folders
    if source_format == FUNCTION:
        path, _, name = spec.function.rpartition(":")
        settings["function"] = [hashlib.sha256(Path(path).read_bytes()).hexdigest(), name]
        settings["code"] = Path(spec.code.archive).name if spec.code else ""
    settings["conform"] = [takes_grey(spec), {name: dtype for name, (dtype, _) in spec.labels.items()}]
    return json.dumps(settings, sort_keys=True)


def prepare(
    spec: PrepareSpec, *, on_progress: Callable[[PrepareProgress], None] = lambda progress: None
) -> DatasetInfo:
    """Prepare `spec.source` below `spec.store`. Do nothing if the same content has been prepared before.

    An interrupted call is resumed. Raises WorkerError: exit code 2 if the source is missing, empty, in an
    unsupported format, or does not fit the job. 1 if the disk fails.
    """
    tree = read_tree(spec.source, is_private=spec.is_private)
    source_format, open_source = detect_format(tree, spec)
    settings = fingerprint_settings(source_format, tree, spec)
    max_bytes = spec.picture.max_bytes if source_format == FOLDERS else sys.maxsize
    fingerprint = tree.fingerprint(settings, max_bytes)
    target = Path(spec.store) / fingerprint
    partial_dataset.make_store(Path(spec.store), tree.root, is_shared=spec.is_shared)
    # A function that is called with its own file reads what nobody else knows of.
    file, root = Path(spec.function.rpartition(":")[0]), tree.root
    is_own = bool(spec.function) and root.is_file() and root.read_bytes() == file.read_bytes()
    is_read_again = spec.is_checked and is_own
    find = functools.partial(partial_dataset.find_stored, target, (tree.root,), is_checked=spec.is_checked)
    if not is_read_again and (stored := find()):
        partial_dataset.set_access(target, tree, is_shared=spec.is_shared)
        return stored
    source = open_source(tree, spec)
    is_in_place = source_format == NPY and isinstance(source, ArraySource) and _is_as_stored(source, spec)
    # One for each source, so that an outdated one is replaced.
    place = hashlib.sha256(os.fsencode(tree.root.resolve())).hexdigest()[:32]
    with PartialDataset(
        Path(spec.store) / f".part-{place}", fingerprint, source.class_names or ()
    ) as partial:
        if not is_read_again and (stored := find()):  # by the process that held the lock
            partial.discard()
            return stored
        _write(source, spec, partial, on_progress, is_in_place=is_in_place)
        info = complete_info(partial.info, source, spec)
        tree_now = read_tree(spec.source, is_private=spec.is_private)
        # A function may write beside what it reads, such as a cache.
        if source_format != FUNCTION and tree_now.fingerprint(settings, max_bytes) != fingerprint:
            remedy = "run `csdctl prepare` when no process writes there"
            raise WorkerError(f"the data at {spec.source} was changed while it was read", remedy=remedy)
        info = partial.finish(target, info, tree.root if is_in_place else None)
        partial_dataset.set_access(target, tree, is_shared=spec.is_shared)
        return info


def _write(
    source: SampleSource,
    spec: PrepareSpec,
    partial: PartialDataset,
    on_progress: Callable[[PrepareProgress], None],
    *,
    is_in_place: bool,
) -> None:
    num_missing = 0 if is_in_place else source.num_samples - partial.info.num_read
    partial_dataset.check_free_space(source.sample_bytes * num_missing, spec.store, "prepared data")
    # A function that may never end must not fill the disk.
    reserve = shutil.disk_usage(spec.store).free // 10 if spec.function and not source.num_samples else 0
    on_progress(_progress_of(partial.info, source.num_samples))
    for block in source.blocks(partial.info.num_read):
        partial.append(conform(block, spec), is_copied=not is_in_place)
        what = f"more than the {partial.info.num_read:,} samples that the function has yielded so far"
        partial_dataset.check_free_space(reserve, spec.store, what, f"let the function end: {ENDING}")
        on_progress(_progress_of(partial.info, source.num_samples))


def _progress_of(info: DatasetInfo, num_total: int) -> PrepareProgress:
    return PrepareProgress(info.num_read, num_total, info.num_read - info.num_samples)


def _is_as_stored(source: ArraySource, spec: PrepareSpec) -> bool:
    samples, labels = source.inputs[""], source.outputs[""]
    stored = conform(source.rows(0, 0), spec)
    forms = (stored.samples.dtype, stored.samples.shape[1:], stored.labels.dtype)
    return forms == (samples.dtype, samples.shape[1:], label_dtype(labels.dtype)) and is_numeric(labels.dtype)


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
        stored_labels = {name: _store_label(name, field, spec) for name, field in labels.items()}
        stored = replace(block, samples=as_samples(samples), labels=sources.to_records(stored_labels, 1))
    _check_finite(SAMPLES, fields_of(samples), fields_of(stored.samples), block, spec)
    _check_finite(LABELS, labels, stored_labels, block, spec)
    return stored


def _store_label(name: str, field: Array, spec: PrepareSpec) -> Array:
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


def complete_info(info: DatasetInfo, source: SampleSource, spec: PrepareSpec) -> DatasetInfo:
    """Return the description with the classes of `source`. Raises WorkerError, exit code 2."""
    names = source.class_names or ()
    if info.num_samples == 0:
        raise _no_usable_samples(info, spec)
    skipped = () if spec.is_private else info.skipped
    info = replace(info, columns=source.columns, skipped=skipped)
    field = LABEL if LABEL in info.labels else ""
    if not names or field not in info.labels or info.labels[field][1]:
        return replace(info, class_counts={})
    if not 0 <= info.max_label < len(names):
        expected = f"the job has {len(names)} classes, so labels must be integers from 0 to {len(names) - 1}"
        problem = f"has labels that are not classes: {expected}"
        raise data_error(spec.source, problem, "fix the labels, or data.classes in job.yaml")
    counts = zip(names, info.class_counts.values(), source.files_of_class, strict=False)
    return replace(
        info,
        max_label=len(names) - 1,
        max_labels={**info.max_labels, field: len(names) - 1},
        unusable_classes=tuple(
            name for name, num_usable, num_files in counts if num_files and not num_usable
        ),
    )


def _no_usable_samples(info: DatasetInfo, spec: PrepareSpec) -> WorkerError:
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in info.num_skipped.items())
    remedy = "fix the data, or data.image and data.tfrecord in job.yaml"
    if set(info.num_skipped) == {"no_label"} and not spec.classes:
        remedy = "if its labels are texts, list the classes as data.classes in job.yaml"
    if set(info.num_skipped) == {"other_format"}:
        # Text, audio or arrays in class folders: nothing in job.yaml makes csdctl read them.
        page = "docs/how-to/prepare-data.md, `Your own function`"
        remedy = f"its files are not PNG, JPEG, BMP or GIF: read them with your own function ({page})"
    return data_error(spec.source, "has no usable samples" + (f": {reasons}" if reasons else ""), remedy)


def look(
    spec: protocol.LookSpec, *, on_progress: Callable[[PrepareProgress], None] = lambda progress: None
) -> protocol.DataLook:
    """Return what the data at `spec.prepare.source` is like. Raises WorkerError as `prepare` does."""
    with tempfile.TemporaryDirectory(prefix=f"csdctl-look-{os.getpid()}-") as scratch:
        request = replace(spec.prepare, store=scratch)
        tree = read_tree(request.source)
        source_format, open_source = detect_format(tree, request)
        if source_format == CSV and request.table is None:
            label = spec.label or _find_label(tree, request)
            request = replace(request, table=protocol.TableSchema((label,), dropped=spec.dropped))
        all_samples = open_source(tree, request)
        source, sizes, max_samples = all_samples, None, all_samples.num_samples
        if source_format == FOLDERS:
            step = max(1, -(-len(tree.files) // MAX_PICTURES))
            thinned = replace(tree, files=tree.files[::step])
            source, sizes = open_source(thinned, request), _measure_pictures(thinned)
        if source_format in (FOLDERS, TFRECORD):
            max_samples = MAX_PICTURES
        info, num_bytes = partial_dataset.empty_info("0" * 32, source.class_names or ()), 0
        is_whole = source.num_samples == all_samples.num_samples
        for block in source.blocks(0):
            if num_bytes >= MAX_BYTES or 0 < max_samples <= info.num_read:
                is_whole = False
                break
            info = partial_dataset.add_block(info, conform(block, request))
            num_bytes += block.samples.nbytes
            on_progress(_progress_of(info, min(source.num_samples, max_samples)))
        files_of_class = all_samples.files_of_class
        return protocol.DataLook(
            source_format,
            complete_info(info, source, request),
            num_samples=info.num_read if is_whole else all_samples.num_samples,
            is_whole=is_whole,
            pictures=sizes,
            class_counts=dict(zip(all_samples.class_names or (), files_of_class, strict=False)),
            table=request.table if source_format == CSV else None,
        )


def _measure_pictures(tree: Tree) -> protocol.PictureSizes | None:
    images = []
    for file in tree.files:
        with contextlib.suppress(OSError, ValueError):  # which is counted as skipped
            images.append(open_image(tree.path_of(file).read_bytes()))
    images = [image for image in images if image]
    sizes = sorted(map(upright_size, images), key=lambda size: (math.prod(size), size))
    formats = sorted({image.format.lower() for image in images})
    return protocol.PictureSizes(tuple(formats), sizes[0], sizes[-1]) if sizes else None


def _find_label(tree: Tree, spec: PrepareSpec) -> str:
    names = array_files.read_columns(
        tree.path_of(next(file for file in tree.files if array_files.is_table(file, tree))), spec.source
    )
    labels = [name for name in names if name.lower() in LABEL_COLUMNS] or (names if len(names) == 1 else [])
    if len(labels) == 1:
        return labels[0]
    listed = protocol.list_names(names, 20) or "none"
    problem = f"which column of {spec.source} is the label? It has {listed}"
    raise JobError(problem, "name it: --label COLUMN")
