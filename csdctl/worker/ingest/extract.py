"""`extract`: computes the features of prepared samples, on the machine that has them.

Features are a prepared data set of their own, stored by what they depend on: samples, the frozen part of the
model, and how it is computed. The same features are computed once.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.features import FeatureExtractor
from csdctl.worker.data.file_hash import check_stored, open_regular
from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.ingest.access import make_store
from csdctl.worker.ingest.limits import DEFAULT_LIMITS, IngestLimits
from csdctl.worker.ingest.partial_dataset import PartialDataset, convert_write_errors, hash_arrays
from csdctl.worker.ingest.sources.source import Block
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.worker.protocol.features import ExtractSpec
from csdctl.worker.protocol.json_codec import from_json

_MAX_DESCRIPTION_BYTES = 16 << 20


def extract(
    spec: ExtractSpec,
    load_backend: Callable[[], tuple[Any, Any]],
    *,
    limits: IngestLimits = DEFAULT_LIMITS,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> DatasetInfo:
    """Compute the features of `spec.source` below `spec.store`; do nothing if they are there.

    TensorFlow is loaded only if there is something to compute. An interrupted call is resumed. Raises
    WorkerError if samples or model cannot be read, or the disk fails.
    """
    samples = PreparedSamples(spec.source)
    fingerprint = _fingerprint(spec)
    store = Path(spec.store)
    target = store / fingerprint
    with convert_write_errors():
        make_store(store, Path(spec.source.images), is_shared=False)
    if done := _find_done(target):
        return done
    partial = PartialDataset(store / f".part-{fingerprint}", fingerprint, 0, limits)
    try:
        if done := _find_done(target):  # by the process that held the lock
            partial.discard()
            return done
        _check_free_space(spec, len(samples) - partial.record.num_read)
        on_progress(PrepareProgress(partial.record.num_read, len(samples)))
        extractor = FeatureExtractor(spec.prefix, *load_backend())
        batch, labels = samples.read(np.arange(0))
        partial.declare(extractor.extract(batch), labels)
        for start in range(partial.record.num_read, len(samples), limits.block_samples):
            rows = np.arange(start, min(len(samples), start + limits.block_samples))
            batch, labels = samples.read(rows)
            features = extractor.extract(batch)
            if not np.isfinite(features).all():
                raise WorkerError(
                    "the model's frozen part computes values that are not finite",
                    remedy="check its weights and recipe.input_range, or store features in float32",
                    exit_code=2,
                )
            partial.append(Block(len(rows), features, labels))
            on_progress(PrepareProgress(partial.record.num_read, len(samples)))
        samples.check()
        return partial.finish(target, _describe(partial, target))
    except WorkerError:
        partial.discard()
        raise
    except BaseException:
        partial.close()
        raise


def _fingerprint(spec: ExtractSpec) -> str:
    """Return a hash of everything that the features depend on."""
    source, prefix = spec.source, spec.prefix
    for file in (prefix.architecture, prefix.weights):
        check_stored(file)
    content = [
        source.images_sha256,
        source.labels_sha256,
        source.start,
        source.stop,
        source.permutation_seed,
        Path(prefix.architecture).name,
        Path(prefix.weights).name,
        prefix.code and Path(prefix.code.archive).name,
        prefix.input_range,
        prefix.precision,
        _version_of("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly"),
        _version_of("keras", "keras-nightly"),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _version_of(*names: str) -> str:
    """Return the version of the first of these packages that is installed; '' without one."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def _find_done(target: Path) -> DatasetInfo | None:
    """Return the description of features that were computed before; None if they are missing or damaged."""
    try:
        with open_regular(target / "dataset.json") as file:
            info = from_json(DatasetInfo, file.read(_MAX_DESCRIPTION_BYTES).decode())
        return info if info.path == str(target) and hash_arrays(info, target) == info else None
    except (OSError, ValueError, RecursionError, WorkerError):  # a ProtocolError is a ValueError
        return None


def _check_free_space(spec: ExtractSpec, num_samples: int) -> None:
    needed_bytes = num_samples * math.prod(spec.shape) * np.dtype(spec.prefix.precision).itemsize
    free_bytes = shutil.disk_usage(spec.store).free
    if needed_bytes > free_bytes:
        raise WorkerError(
            f"features cannot be written: they need {needed_bytes / 1e9:.1f} GB, "
            f"{free_bytes / 1e9:.1f} GB are free",
            remedy="free disk space, or train without --way features",
        )


def _describe(partial: PartialDataset, target: Path) -> DatasetInfo:
    record = partial.record
    largest = {
        name: value if record.min_labels[name] >= 0 else -1 for name, value in record.max_labels.items()
    }
    return DatasetInfo(
        path=str(target),
        num_samples=record.num_samples,
        sample_shape=record.sample_shape,
        dtype=record.dtype,
        label_shape=record.label_shape,
        max_label=largest.get("", -1),
        fingerprint=record.fingerprint,
        label_dtype=record.label_dtype,
        max_labels=largest,
    )
