"""`extract`: runs a model over prepared samples, on the machine that has them. `gather` and `send`.

Its result is a prepared data set, stored by what it depends on. `gather` puts features of several
machines together, as this machine would compute them by itself.
"""

import base64
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from csdctl.worker.compute.forward import feature_pass, forward_pass
from csdctl.worker.compute.user_code import Augmentation, import_packed
from csdctl.worker.data.arrays import Array, CheckedArray, dtype_from_text
from csdctl.worker.data.file_hash import check_stored, open_regular
from csdctl.worker.data.prepared import PreparedSamples, rows_of
from csdctl.worker.engine.forward import BATCH_SIZE, to_results
from csdctl.worker.ingest.partial_dataset import PartialDataset, check_free_space, find_stored, make_store
from csdctl.worker.ingest.sources.source import Block
from csdctl.worker.process.errors import JobError, WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.worker.protocol.features import Extracted, ExtractSpec, Gathered, GatherSpec, SendSpec
from csdctl.worker.protocol.packages import TENSORFLOW, find_version
from csdctl.worker.protocol.run_spec import DatasetSlice

Compute = Callable[[Array, Array], tuple[Array, Array]]
"""Makes of samples and labels, each of shape (n, …), what is stored."""
Rows = Callable[[PartialDataset, PreparedSamples], Iterator[Block]]
"""Yields the rows that a partial data set lacks, of some samples."""
OnProgress = Callable[[PrepareProgress], None]

GATHERED_ROWS = 4096
"""Rows of features that `gather` holds in memory."""
LINE_BYTES = 48 << 10
"""Bytes of the file in one line; 64 KiB in base64."""


def extract(spec: ExtractSpec, *, on_progress: OnProgress = lambda progress: None) -> Extracted:
    """Run the model over the samples, and store what is kept below `spec.store`. Nothing if it is there.

    An interrupted call is resumed. Raises WorkerError if samples or model cannot be read, or the disk fails.
    """
    load = functools.cache(lambda: load_computation(spec))
    requests = of_sources(spec)
    sizes = [len(PreparedSamples(request.source)) * num_views(request) for request in requests]
    parts: list[DatasetInfo] = []
    num_computed = num_before = 0
    for request, size in zip(requests, sizes, strict=True):

        def note(progress: PrepareProgress, num_before: int = num_before) -> None:
            on_progress(PrepareProgress(num_before + progress.num_done, sum(sizes)))

        info, num_new = _store_rows(request, functools.partial(_compute_rows, request, load), note)
        parts.append(info)
        num_computed += num_new
        num_before += size
    return Extracted(tuple(parts), num_computed)


def of_sources(spec: ExtractSpec) -> list[ExtractSpec]:
    """Return what to compute of each source. Validation samples have no views."""
    sources = [spec.source, *spec.more_sources]
    views = [spec.augmented] * (len(sources) - spec.num_plain) + [None] * spec.num_plain
    pairs = zip(sources, views, strict=True)
    return [dataclasses.replace(spec, source=source, augmented=augmented) for source, augmented in pairs]


def num_views(spec: ExtractSpec) -> int:
    """Return how many rows are computed of each sample."""
    return spec.augmented.num_views if spec.augmented else 1


def _store_rows(spec: ExtractSpec, rows: Rows, on_progress: OnProgress) -> tuple[DatasetInfo, int]:
    """Store the rows of `spec.source`, from the first missing one on. Return how many are new, too."""
    samples = PreparedSamples(spec.source)
    num_rows = len(samples) * num_views(spec)
    target = _target_of(spec)
    make_store(target.parent, Path(spec.source.images), is_shared=False)
    if stored := find_stored(target):
        return stored, 0
    directory = target.with_name(f".part-{target.name}")
    with PartialDataset(directory, target.name) as partial:
        if stored := find_stored(target):  # by the process that held the lock
            partial.discard()
            return stored, 0
        num_before = partial.info.num_samples
        on_progress(PrepareProgress(num_before, num_rows))
        for block in rows(partial, samples):
            partial.append(block)
            on_progress(PrepareProgress(partial.info.num_samples, num_rows))
        samples.check()
        return partial.finish(target), num_rows - num_before


def _target_of(spec: ExtractSpec) -> Path:
    return Path(spec.store) / fingerprint_of(spec)


def _compute_rows(
    spec: ExtractSpec, load: Callable[[], Compute], partial: PartialDataset, samples: PreparedSamples
) -> Iterator[Block]:
    compute, augment = load(), load_augmentation(spec)
    partial.declare(*compute(*samples.read(np.arange(0))))
    row_bytes = math.prod(partial.info.sample_shape) * dtype_from_text(partial.info.dtype).itemsize
    num_rows = len(samples) * num_views(spec)
    what, remedy = "features", "train with another strategy"
    if spec.results:
        what, remedy = "results", "ask for classes only"
    check_free_space((num_rows - partial.info.num_samples) * row_bytes, spec.store, what, remedy)
    while partial.info.num_samples < num_rows:
        view, start = divmod(partial.info.num_samples, len(samples))
        yield Block(*compute(*augment(*samples.span(start, BATCH_SIZE), view, start)))


def load_computation(spec: ExtractSpec) -> Compute:
    """Return what computes the rows to store. Raises WorkerError if the model cannot be run here."""
    if spec.results:
        forward = forward_pass(
            spec.prefix, lambda outputs: to_results(outputs, spec.results), spec.runtime, spec.layer
        )
        return lambda samples, labels: (forward.run(samples), np.zeros((len(samples), 0), np.float32))
    extractor = feature_pass(spec.prefix, spec.runtime)

    def compute(samples: Array, labels: Array) -> tuple[Array, Array]:
        features = extractor.run(samples)
        if not np.isfinite(features).all():
            remedy = "check its weights and recipe.input_range, or store features in float32"
            raise JobError("the model's frozen part computes values that are not finite", remedy)
        return features, labels

    return compute


def load_augmentation(spec: ExtractSpec) -> Callable[[Array, Array, int, int], tuple[Array, Array]]:
    """Return what makes a view of samples: by numbers of the view and the first sample, always the same."""
    if spec.augmented is None:
        return lambda samples, labels, view, start: (samples, labels)
    content = f"{spec.source.images_sha256} {spec.source.start}"
    data = int.from_bytes(hashlib.sha256(content.encode()).digest()[:4])
    if code := spec.prefix.code:
        import_packed(code.archive, code.modules)
    function = Augmentation(spec.augmented.augment, spec.augmented.seed)

    def make(samples: Array, labels: Array, view: int, start: int) -> tuple[Array, Array]:
        rows = [slice(n, n + 1) for n in range(len(samples))]
        parts = [function(samples[row], labels[row], view, data ^ (start + row.start)) for row in rows]
        return np.concatenate([part for part, _ in parts]), np.concatenate([part for _, part in parts])

    return make


def fingerprint_of(spec: ExtractSpec) -> str:
    """Return a hash of everything that the stored rows depend on."""
    prefix, views = spec.prefix, spec.augmented
    for file in prefix.files:
        check_stored(file)
    code = prefix.code.archive if prefix.code and views else ""
    content = [
        dataclasses.asdict(dataclasses.replace(spec.source, images="", labels="")),
        [*(Path(file).name for file in prefix.files), prefix.input_range, prefix.precision],
        [
            find_version(*TENSORFLOW),
            not prefix.compiled and find_version("keras", "keras-nightly"),
            BATCH_SIZE,
        ],
        # FILE.py:NAME; its code is in the archive
        views and [Path(code).name, Path(views.augment).name, views.seed, views.num_views],
        [spec.layer, *map(dataclasses.astuple, spec.results)],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def gather(spec: GatherSpec, *, on_progress: OnProgress = lambda progress: None) -> Gathered:
    """Store the features of `spec.parts`, which are of all samples. Raises WorkerError for anything else."""
    if not spec.parts:
        return Gathered(is_stored=find_stored(_target_of(spec.request)) is not None)
    _store_rows(spec.request, functools.partial(_merge, spec), on_progress)
    return Gathered(is_stored=True)


def _merge(spec: GatherSpec, partial: PartialDataset, samples: PreparedSamples) -> Iterator[Block]:
    num_samples, seed = len(samples), spec.request.source.permutation_seed
    dtype = spec.request.prefix.precision
    parts = [CheckedArray(part.path, part.sha256).array for part in spec.parts]
    owners, places = np.full(num_samples, -1), np.zeros(num_samples, np.int64)
    for number, (part, features) in enumerate(zip(spec.parts, parts, strict=True)):
        rows = rows_of(DatasetSlice("", "", part.start, part.stop, seed), num_samples)
        expected = len(rows), *spec.shape
        if (features.dtype.name, features.shape) != (dtype, expected):
            sent = f"{part.node} sent {features.dtype} of shape {features.shape}"
            raise WorkerError(f"{sent}, expected {dtype} of {expected}", remedy=f"examine {part.node}")
        owners[rows], places[rows] = number, np.arange(len(rows))
    if missing := int((owners < 0).sum()):
        raise WorkerError(f"the features of {missing} of {num_samples} samples are missing")
    for row in range(partial.info.num_samples, num_samples, GATHERED_ROWS):
        rows = np.arange(row, min(num_samples, row + GATHERED_ROWS))
        merged = np.empty((len(rows), *spec.shape), dtype)
        for number, (part, features) in enumerate(zip(spec.parts, parts, strict=True)):
            is_here = owners[rows] == number
            merged[is_here] = features[places[rows[is_here]]]
            if not np.isfinite(merged[is_here]).all():
                problem = f"{part.node} sent features that are not finite"
                raise WorkerError(problem, remedy=f"examine {part.node}")
        yield Block(merged, samples.labels(rows))


def send(spec: SendSpec, write: Callable[[str], None], *, home: Path = Path()) -> None:
    """Write the stored numbers as lines of base64. Raises WorkerError if they are not there."""
    try:
        with open_regular(home / spec.store / spec.fingerprint / "images.npy") as file:
            while block := file.read(LINE_BYTES):
                write(base64.b64encode(block).decode())
    except (OSError, ValueError) as error:
        problem = f"the results cannot be read: {type(error).__name__}"
        raise WorkerError(problem, remedy="run the same command again") from None
