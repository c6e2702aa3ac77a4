"""A digest of a prepared data set, to check that machines with a shared file system see the same data."""

import hashlib

import numpy as np

from csdctl.worker.data.arrays import open_arrays
from csdctl.worker.data.element_spec import dtype_to_text
from csdctl.worker.protocol.datasets import DatasetDigest

NUM_ROWS = 64
"""Samples that are hashed, evenly spaced; labels are all hashed."""


def compute_digest(directory: str) -> DatasetDigest:
    """Return the digest of the data set in `directory`; raises WorkerError if it cannot be read."""
    samples, labels = open_arrays(f"{directory}/images.npy", f"{directory}/labels.npy")
    digest = hashlib.sha256(
        repr(
            (samples.shape, dtype_to_text(samples.dtype), labels.shape, dtype_to_text(labels.dtype))
        ).encode()
    )
    digest.update(labels.tobytes())
    for row in np.linspace(0, len(samples) - 1, min(NUM_ROWS, len(samples)), dtype=np.int64):
        digest.update(samples[row].tobytes())
    return DatasetDigest(len(samples), digest.hexdigest())
