"""`look`: what a data set is like, from some of its samples.

Samples are read as `prepare` reads them, and nothing is kept. Only for data of the host.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace

from csdctl.worker.ingest.partial_dataset import add_block, empty_info
from csdctl.worker.ingest.prepare import complete_info, detect_format
from csdctl.worker.ingest.sources.images import read_header
from csdctl.worker.ingest.sources.source import (
    DEFAULT_LIMITS,
    Tree,
    conform,
    num_threads,
    read_tree,
)
from csdctl.worker.ingest.sources.table import is_table, read_columns
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import (
    DataLook,
    LookSpec,
    PictureSizes,
    PrepareProgress,
    PrepareSpec,
    TableSchema,
    list_names,
)

MAX_PICTURES = 512
MAX_BYTES = 64 << 20
"""Limit for the bytes of samples that are read."""
LABELS = ("label", "labels", "target", "targets", "y", "class", "outcome", "category")
"""Names of a column with the label."""


def look(
    spec: LookSpec, *, on_progress: Callable[[PrepareProgress], None] = lambda progress: None
) -> DataLook:
    """Return what the data at `spec.prepare.source` is like; raises WorkerError as `prepare` does."""
    with tempfile.TemporaryDirectory(prefix="csdctl-look-") as scratch:
        return _look(spec, replace(spec.prepare, store=scratch), on_progress)


def _look(spec: LookSpec, prepared: PrepareSpec, on_progress: Callable[[PrepareProgress], None]) -> DataLook:
    tree = read_tree(prepared.source)
    source_format, open_source = detect_format(tree, prepared)
    if source_format == "csv" and prepared.table is None:
        prepared = replace(prepared, table=_choose_columns(tree, spec))
    is_tree = source_format == "class folders"
    whole = open_source(tree, prepared, num_threads())
    source = open_source(_thin(tree), prepared, num_threads()) if is_tree else whole
    max_samples = MAX_PICTURES if is_tree or source_format == "tfrecord" else source.num_samples
    info, num_bytes = empty_info("0" * 32, source.class_names or ()), 0
    is_whole = source.num_samples == whole.num_samples
    for block in source.blocks(0, DEFAULT_LIMITS):
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
    """Return the tree with about MAX_PICTURES of its files, from all of its folders."""
    step = -(-len(tree.files) // MAX_PICTURES)
    return replace(tree, files=tree.files[:: max(1, step)])


def _measure_pictures(tree: Tree) -> PictureSizes | None:
    headers = []
    for file in tree.files:
        try:
            header = read_header(tree.path_of(file).read_bytes())
        except (OSError, ValueError):  # which is counted as skipped
            continue
        headers += [header] if header else []
    if not headers:
        return None
    by_size = sorted((header.height * header.width, header.height, header.width) for header in headers)
    formats = tuple(sorted({header.format for header in headers}))
    return PictureSizes(formats, by_size[0][1:], by_size[-1][1:])


def _choose_columns(tree: Tree, spec: LookSpec) -> TableSchema:
    """Return the label's column of a table; raises WorkerError, exit code 2, if it is not clear."""
    file = next(file for file in tree.files if is_table(file, tree))
    columns = read_columns(tree.path_of(file), spec.prepare.source)
    return TableSchema((_choose_label(columns, spec),), "", spec.dropped)


def _choose_label(names: list[str], spec: LookSpec) -> str:
    """Return the column that is called as a label; raises WorkerError if that is not clear."""
    if spec.label:
        return spec.label  # whatever reads it reports one that does not exist
    found = [name for name in names if name.lower() in LABELS]
    if not found and len(names) == 1:
        found = names
    if len(found) == 1:
        return found[0]
    raise WorkerError(
        f"which column of {spec.prepare.source} is the label? It has {list_names(names, 20) or 'none'}",
        remedy="name it: --label COLUMN",
        exit_code=2,
    )
