"""Compares stored features with what the machine that stored them computes of the same samples now."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.forward import BATCH_SIZE
from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.ingest.extract import (
    Compute,
    find_done,
    fingerprint_of,
    load_augmentation,
    load_computation,
    num_views,
    of_sources,
)
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.features import Extracted, ExtractSpec, Recomputed
from csdctl.worker.protocol.run_spec import DatasetSlice


def recompute(spec: ExtractSpec, load_backend: Callable[[], tuple[Any, Any]]) -> Extracted:
    """Compute about `spec.num_checked` stored rows of all sources again; raises WorkerError.

    Whole batches, as they were computed at first: in another batch, a kernel may round differently.
    """
    found = [(one, Path(one.store) / fingerprint_of(one)) for one in of_sources(spec)]
    stored = [(one, info) for one, target in found if (info := find_done(target))]
    if not stored:
        return Extracted((), 0, Recomputed(0, 0.0))
    compute = load_computation(spec, load_backend)
    num_batches = max(1, spec.num_checked // (BATCH_SIZE * len(stored)))
    compared = [_compare(one, info, compute, num_batches) for one, info in stored]
    return Extracted(
        (), 0, Recomputed(sum(rows for rows, _ in compared), max(difference for _, difference in compared))
    )


def _compare(spec: ExtractSpec, info: DatasetInfo, compute: Compute, num_batches: int) -> tuple[int, float]:
    """Return the number of rows that were computed again, and their largest relative difference."""
    samples = PreparedSamples(spec.source)
    images, labels = (str(Path(info.path, f"{name}.npy")) for name in ("images", "labels"))
    stored = PreparedSamples(
        DatasetSlice(images, labels, images_sha256=info.images_sha256, labels_sha256=info.labels_sha256)
    )
    augment = load_augmentation(spec)
    starts = range(0, len(samples), BATCH_SIZE)
    places = [(view, start) for view in range(num_views(spec.augmented)) for start in starts]
    num_rows, difference = 0, 0.0
    for place in np.unique(np.linspace(0, len(places) - 1, num_batches, dtype=int)) if places else ():
        view, start = places[place]
        rows = np.arange(start, min(len(samples), start + BATCH_SIZE))
        again, _ = compute(*augment(*samples.read(rows), view, start))
        before = stored.read(rows + view * len(samples))[0].astype(np.float64)
        largest = float(np.abs(before).max(initial=0)) or 1.0
        difference = max(
            difference, float(np.abs(again.astype(np.float64) - before).max(initial=0)) / largest
        )
        num_rows += len(rows)
    return num_rows, difference
