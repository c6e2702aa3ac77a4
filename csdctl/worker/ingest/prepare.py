"""`prepare`: converts a user's data into a prepared data set, on the machine that has the data, and `look`.

Private data is prepared on its own node by this code, and only counts, shapes and a fingerprint are returned:
messages may name classes, but no file below the root. `look` reads samples as `prepare` does, to say what a
data set of the host is like, and keeps nothing.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from csdctl.worker.data.arrays import is_numeric, label_dtype
from csdctl.worker.ingest.partial_dataset import (
    PartialDataset,
    add_block,
    check_free_space,
    empty_info,
    find_stored,
    make_store,
    set_access,
)
from csdctl.worker.ingest.sources.arrays import (
    ArraySource,
    empty_data_error,
    is_table,
    open_npy_files,
    open_npz,
    open_table,
    read_columns,
)
from csdctl.worker.ingest.sources.function import ENDING, call_function
from csdctl.worker.ingest.sources.images import ClassFolders, RecordFiles, is_record_file, read_header
from csdctl.worker.ingest.sources.source import (
    SampleSource,
    Tree,
    conform,
    data_error,
    num_threads,
    read_tree,
    takes_grey,
)
from csdctl.worker.process.errors import InputError, WorkerError
from csdctl.worker.protocol.datasets import (
    LABEL,
    DataLook,
    DatasetInfo,
    LookSpec,
    PictureSizes,
    PrepareProgress,
    PrepareSpec,
    TableSchema,
    list_names,
)

SUPPORTED_DATA = (
    "folders named by class that contain PNG, JPEG, BMP or GIF images, TFRecord files, images.npy and "
    "labels.npy, one .npz file with x and y, or .csv files"
)

Open = Callable[[Tree, PrepareSpec, int], SampleSource]
"""Opens the files of a tree, to be read by so many threads; raises WorkerError, exit code 2."""


MAX_PICTURES = 512
MAX_BYTES = 64 << 20
LABELS = ("label", "labels", "target", "targets", "y", "class", "outcome", "category")


def detect_format(tree: Tree, spec: PrepareSpec) -> tuple[str, Open]:
    """Return the name of the format, and what opens it. Raises WorkerError, exit code 2."""
    if spec.function:
        return "function", call_function
    if not tree.files and not tree.folders:
        raise empty_data_error(spec.source)
    top = [file for file in tree.files if len(file.parts) < 2]
    named = [tree.path_of(file) for file in top if file.parts]
    if {"images.npy", "labels.npy"} & {path.name for path in named}:
        return "npy", lambda tree, spec, _: open_npy_files(tree.root, spec)
    npz = [path for path in map(tree.path_of, top) if path.suffix.lower() == ".npz"]
    if len(npz) == 1:
        return "npz", lambda _, spec, threads: open_npz(npz[0], spec)
    if top and all(is_table(file, tree) for file in (tree.files if spec.table or tree.folders else top)):
        return "csv", lambda tree, spec, _: open_table(tree, spec)
    record_files = [file for file in tree.files if is_record_file(file, tree)]
    if any(file in record_files for file in top) or (record_files and spec.records):
        return "tfrecord", RecordFiles
    if tree.folders:
        return "class folders", ClassFolders
    raise data_error(spec.source, "is not in a supported format", f"expected {SUPPORTED_DATA}")


def fingerprint_settings(source_format: str, tree: Tree, spec: PrepareSpec) -> str:
    """Return, as text, everything besides the files that determines the prepared bytes."""
    settings: dict[str, object] = {"kind": source_format, "classes": spec.classes}
    if source_format in ("tfrecord", "class folders", "function"):
        settings["picture"] = asdict(spec.picture)
    if source_format == "class folders":
        settings["folders"] = tree.folders
    if source_format == "tfrecord":
        settings["records"] = asdict(spec.records) if spec.records else None
    if source_format == "function":
        path, _, name = spec.function.rpartition(":")
        settings["function"] = [hashlib.sha256(Path(path).read_bytes()).hexdigest(), name]
        settings["code"] = Path(spec.code.archive).name if spec.code else ""
    if source_format in ("csv", "function", "npz"):
        settings["inputs"], settings["table"] = spec.inputs, asdict(spec.table) if spec.table else None
    if source_format == "csv":
        settings["columns"] = spec.columns
    settings |= {"is_regression": spec.is_regression, "allows_nan": spec.allows_nan, "outputs": spec.outputs}
    types = {name: dtype for name, (dtype, _) in spec.labels.items()}
    settings["conform"] = [takes_grey(spec), spec.labels if source_format == "function" else types]
    return json.dumps(settings, sort_keys=True)


def prepare(
    spec: PrepareSpec,
    *,
    threads: int = 0,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> DatasetInfo:
    """Prepare `spec.source` below `spec.store`. Do nothing if the same content has been prepared before.

    `threads` 0 means one per core. An interrupted call is resumed. Raises WorkerError: exit code 2 if the
    source is missing, empty, in an unsupported format, or does not fit the job. 1 if the disk fails.
    """
    tree = read_tree(spec.source, is_private=spec.is_private)
    source_format, open_source = detect_format(tree, spec)
    settings = fingerprint_settings(source_format, tree, spec)
    max_bytes = spec.picture.max_bytes if source_format == "class folders" else sys.maxsize
    fingerprint = tree.fingerprint(settings, max_bytes)
    target = Path(spec.store) / fingerprint
    make_store(Path(spec.store), tree.root, is_shared=spec.is_shared)
    find = functools.partial(find_stored, target, (tree.root,), is_checked=spec.is_checked)
    # A function that is called with its own file reads what nobody else knows of.
    is_read_again = spec.is_checked and _is_own_file(spec, tree.root)
    if not is_read_again and (done := find()):
        set_access(target, tree, is_shared=spec.is_shared)
        return done
    source = open_source(tree, spec, threads or num_threads())
    is_in_place = source_format == "npy" and isinstance(source, ArraySource) and _is_as_stored(source, spec)
    # One for each source, so that an outdated one is replaced.
    place = hashlib.sha256(os.fsencode(tree.root.resolve())).hexdigest()[:32]
    aside = Path(spec.store) / f".part-{place}"
    with PartialDataset(aside, fingerprint, source.class_names or ()) as partial:
        if not is_read_again and (done := find()):  # by the process that held the lock
            partial.discard()
            return done
        num_left = 0 if is_in_place else source.num_samples - partial.info.num_read
        check_free_space(source.sample_bytes * num_left, spec.store, "prepared data")

        def report() -> None:
            num_read = partial.info.num_read
            on_progress(PrepareProgress(num_read, source.num_samples, num_read - partial.info.num_samples))

        report()
        reserve = shutil.disk_usage(spec.store).free // 10 if spec.function and not source.num_samples else 0
        for block in source.blocks(partial.info.num_read):
            partial.append(conform(block, spec), is_copied=not is_in_place)
            # What may never end must not fill the disk.
            what = f"more than the {partial.info.num_read:,} samples that the function has yielded so far"
            check_free_space(reserve, spec.store, what, f"let the function end: {ENDING}")
            report()
        info = complete_info(partial.info, source, spec)
        now = read_tree(spec.source, is_private=spec.is_private)
        # A function may write beside what it reads, such as a cache.
        if source_format != "function" and now.fingerprint(settings, max_bytes) != fingerprint:
            remedy = "run `csdctl prepare` when no process writes there"
            raise WorkerError(f"the data at {spec.source} was changed while it was read", remedy=remedy)
        finished = partial.finish(target, info, tree.root if is_in_place else None)
        set_access(target, tree, is_shared=spec.is_shared)
        return finished


def _is_own_file(spec: PrepareSpec, path: Path) -> bool:
    """Return whether the path of the data is the file of the function that returns it."""
    file = Path(spec.function.rpartition(":")[0])
    return bool(spec.function) and path.is_file() and path.read_bytes() == file.read_bytes()


def _is_as_stored(source: ArraySource, spec: PrepareSpec) -> bool:
    """Return whether samples and labels need no conversion but that of labels when they are read."""
    samples, labels = source.inputs[""], source.outputs[""]
    stored = conform(source.rows(0, 0), spec)
    found = (stored.samples.dtype, stored.samples.shape[1:], stored.labels.dtype)
    is_same = found == (samples.dtype, samples.shape[1:], label_dtype(labels.dtype))
    return is_same and is_numeric(labels.dtype)


def complete_info(info: DatasetInfo, source: SampleSource, spec: PrepareSpec) -> DatasetInfo:
    """Return the description with classes and padding of `source`. Raises WorkerError, exit code 2."""
    names = source.class_names or ()
    if info.num_samples == 0:
        raise _no_usable_samples(info, spec)
    skipped = () if spec.is_private else info.skipped
    info = replace(info, padded=source.padded, columns=source.columns, skipped=skipped)
    field = LABEL if LABEL in info.labels else ""
    if not names or field not in info.labels or info.labels[field][1]:
        return replace(info, class_counts={})
    if not 0 <= info.max_label < len(names):
        expected = f"the job has {len(names)} classes, so labels must be integers from 0 to {len(names) - 1}"
        problem = f"has labels that are not classes: {expected}"
        raise data_error(spec.source, problem, "fix the labels, or data.classes in job.yaml")
    counted = zip(names, info.class_counts.values(), source.files_of_class, strict=False)
    return replace(
        info,
        max_label=len(names) - 1,
        max_labels={**info.max_labels, field: len(names) - 1},
        unusable_classes=tuple(name for name, usable, files in counted if files and not usable),
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
    spec: LookSpec, *, on_progress: Callable[[PrepareProgress], None] = lambda progress: None
) -> DataLook:
    """Return what the data at `spec.prepare.source` is like. Raises WorkerError as `prepare` does."""
    with tempfile.TemporaryDirectory(prefix=f"csdctl-look-{os.getpid()}-") as scratch:
        prepared = replace(spec.prepare, store=scratch)
        tree = read_tree(prepared.source)
        source_format, open_source = detect_format(tree, prepared)
        if source_format == "csv" and prepared.table is None:
            prepared = replace(prepared, table=TableSchema((_choose_label(tree, spec),), drop=spec.dropped))
        is_tree = source_format == "class folders"
        whole = open_source(tree, prepared, num_threads())
        source = open_source(_thin(tree), prepared, num_threads()) if is_tree else whole
        max_samples = MAX_PICTURES if is_tree or source_format == "tfrecord" else source.num_samples
        info, num_bytes = empty_info("0" * 32, source.class_names or ()), 0
        is_whole = source.num_samples == whole.num_samples
        for block in source.blocks(0):
            if num_bytes >= MAX_BYTES or 0 < max_samples <= info.num_read:
                is_whole = False
                break
            info = add_block(info, conform(block, prepared))
            num_bytes += block.samples.nbytes
            total = min(source.num_samples, max_samples)
            on_progress(PrepareProgress(info.num_read, total, info.num_read - info.num_samples))
        names = whole.class_names or ()
        return DataLook(
            source_format,
            complete_info(info, source, prepared),
            info.num_read if is_whole else whole.num_samples,
            is_whole,
            _measure_pictures(_thin(tree)) if is_tree else None,
            dict(zip(names, whole.files_of_class, strict=True)) if whole.files_of_class else {},
            prepared.table if source_format == "csv" else None,
        )


def _thin(tree: Tree) -> Tree:
    step = -(-len(tree.files) // MAX_PICTURES)
    return replace(tree, files=tree.files[:: max(1, step)])


def _measure_pictures(tree: Tree) -> PictureSizes | None:
    headers = []
    for file in tree.files:
        with contextlib.suppress(OSError, ValueError):  # which is counted as skipped
            header = read_header(tree.path_of(file).read_bytes())
            headers += [header] if header else []
    if not headers:
        return None
    by_size = sorted((header.height * header.width, header.height, header.width) for header in headers)
    formats = tuple(sorted({header.format for header in headers}))
    return PictureSizes(formats, by_size[0][1:], by_size[-1][1:])


def _choose_label(tree: Tree, spec: LookSpec) -> str:
    """Return the column of a table that is called as a label. Raises WorkerError if that is not clear."""
    if spec.label:
        return spec.label  # whatever reads it reports one that does not exist
    file = next(file for file in tree.files if is_table(file, tree))
    names = read_columns(tree.path_of(file), spec.prepare.source)
    found = [name for name in names if name.lower() in LABELS]
    if not found and len(names) == 1:
        found = names
    if len(found) == 1:
        return found[0]
    listed = list_names(names, 20) or "none"
    problem = f"which column of {spec.prepare.source} is the label? It has {listed}"
    raise InputError(problem, "name it: --label COLUMN")
