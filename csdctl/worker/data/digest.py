"""What this machine sees of a prepared data set that others use too, on a file system they share."""

import hashlib

import numpy as np

from csdctl.worker.data.prepared import open_arrays
from csdctl.worker.protocol.datasets import DatasetDigest

NUM_ROWS = 64
"""Of the samples, so many are compared; of the labels, all."""


def compute_digest(directory: str) -> DatasetDigest:
    """What is in `directory`; raises WorkerError when its arrays cannot be read."""
    images, labels = open_arrays(f"{directory}/images.npy", f"{directory}/labels.npy")
    digest = hashlib.sha256(repr((images.shape, str(images.dtype), labels.shape, str(labels.dtype))).encode())
    digest.update(labels.tobytes())
    for row in np.linspace(0, len(images) - 1, min(NUM_ROWS, len(images)), dtype=np.int64):
        digest.update(images[row].tobytes())
    return DatasetDigest(len(images), digest.hexdigest())
