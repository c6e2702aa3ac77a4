"""`gather` puts features together that several machines have computed of public samples; `send` sends them.

What is stored is what `extract` would compute on this machine alone, and finds from then on.
"""

import base64
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array, CheckedArray
from csdctl.worker.data.file_hash import hash_file, open_regular
from csdctl.worker.data.prepared import PreparedSamples, rows_of
from csdctl.worker.ingest.extract import describe_partial, find_done, fingerprint_of
from csdctl.worker.ingest.partial_dataset import PartialDataset, convert_write_errors, make_store
from csdctl.worker.ingest.sources.source import Block
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.features import FEATURE_STORE, Gathered, GatheredPart, GatherSpec, SendSpec, Sent
from csdctl.worker.protocol.run_spec import DatasetSlice

BLOCK_SAMPLES = 4096


def gather(
    spec: GatherSpec, *, on_progress: Callable[[PrepareProgress], None] = lambda progress: None
) -> Gathered:
    """Store the features of `spec.parts` as those of all samples, unless they are stored.

    Raises WorkerError for parts that are not the features of all samples, or if the disk fails.
    """
    wanted = spec.wanted
    fingerprint = fingerprint_of(wanted)
    store = Path(wanted.store)
    with convert_write_errors():
        make_store(store, Path(wanted.source.images), is_shared=False)
    target = store / fingerprint
    if find_done(target):
        return Gathered(is_stored=True)
    if not spec.parts:
        return Gathered(is_stored=False)
    samples = PreparedSamples(wanted.source)
    merged = _Merged(spec, len(samples))
    with PartialDataset(store / f".part-{fingerprint}", fingerprint, 0) as partial:
        while (start := partial.record.num_read) < len(samples):
            rows = np.arange(start, min(len(samples), start + BLOCK_SAMPLES))
            partial.append(Block(len(rows), merged.read(rows), samples.labels(rows)))
            on_progress(PrepareProgress(partial.record.num_read, len(samples)))
        samples.check()
        partial.finish(target, describe_partial(partial, target))
    return Gathered(is_stored=True)


class _Merged:
    """The features of all samples, in the order of the samples."""

    def __init__(self, spec: GatherSpec, num_samples: int) -> None:
        self._parts = [_open(part, spec) for part in spec.parts]
        self._owners = np.full(num_samples, -1)
        self._places = np.zeros(num_samples, np.int64)
        seed = spec.wanted.source.permutation_seed
        for number, (part, features) in enumerate(zip(spec.parts, self._parts, strict=True)):
            rows = rows_of(DatasetSlice("", "", part.start, part.stop, seed), num_samples)
            if len(features) != len(rows):
                raise WorkerError(f"{part.node} sent {len(features)} features, expected {len(rows)}")
            self._owners[rows], self._places[rows] = number, np.arange(len(rows))
        if missing := int((self._owners < 0).sum()):
            raise WorkerError(f"the features of {missing} of {num_samples} samples are missing")
        self._spec = spec

    def read(self, rows: Array) -> Array:
        """Return the features, shape (n, …), of `rows`, shape (n,)."""
        found = np.empty((len(rows), *self._spec.shape), self._spec.wanted.prefix.precision)
        for number, features in enumerate(self._parts):
            is_here = self._owners[rows] == number
            found[is_here] = features[self._places[rows[is_here]]]
            if not np.isfinite(found[is_here]).all():
                node = self._spec.parts[number].node
                raise WorkerError(f"{node} sent features that are not finite", remedy=f"examine {node}")
        return found


def _open(part: GatheredPart, spec: GatherSpec) -> Array:
    features = CheckedArray(part.path, part.sha256).array
    expected = spec.wanted.prefix.precision, spec.shape
    if (features.dtype.name, features.shape[1:]) != expected:
        raise WorkerError(
            f"{part.node} sent {features.dtype.name} of shape {features.shape[1:]}, "
            f"expected {expected[0]} of {expected[1]}",
            remedy=f"examine {part.node}",
        )
    return features


LINE_BYTES = 48 << 10
"""Of the file in one line; 64 KiB in base64."""


def send(spec: SendSpec, write: Callable[[str], None], *, home: Path = Path()) -> Sent:
    """Write the stored numbers as lines of base64; raises WorkerError unless they are what was described."""
    what = "features" if spec.store == FEATURE_STORE else "results"
    again = "run the same command again"
    if not re.fullmatch(r"[0-9a-f]{64}", spec.fingerprint):
        raise WorkerError(f"no {what} have this fingerprint", exit_code=2)
    try:
        with open_regular(home / spec.store / spec.fingerprint / "images.npy") as file:
            if hash_file(file, what) != spec.sha256:
                raise WorkerError(f"the {what} have changed since they were computed", remedy=again)
            file.seek(0)
            num_bytes = 0
            while block := file.read(LINE_BYTES):
                num_bytes += len(block)
                write(base64.b64encode(block).decode())
            return Sent(num_bytes)
    except (OSError, ValueError) as error:
        raise WorkerError(f"the {what} cannot be read: {type(error).__name__}", remedy=again) from None
