"""`verify`: the gradient of the ranks against that of one process, on the user's own model and fleet.

Samples are random, made from (seed, rank) wherever they are needed: no private sample has to travel, and rank
0 can compute for all ranks what they computed.
"""

from typing import Any

import numpy as np

from csdctl.worker.compute.model import hash_weights
from csdctl.worker.compute.step import Step
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.element_spec import random_samples
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.events import emit
from csdctl.worker.protocol.events import Verified
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec

MAX_SAMPLES = 32
"""Of a rank: enough for unequal batches, and few enough for rank 0 to compute for all."""


def verify(spec: RunSpec, me: RankSpec, ranks: Communicator, step: Step, example: tuple[Array, Array]) -> str:
    """Take one step together and compare; returns the hash of the weights after it. Raises WorkerError."""
    sizes = [verified_samples(rank.batch_size) for rank in spec.ranks]
    step.set_step(0, spec.recipe.learning_rate)
    mine = make_samples(spec, me.rank, sizes[me.rank], example, step)
    vector = np.array(step.local(*mine))
    padded = np.zeros_like(ranks.local)
    padded[: step.size] = vector
    total = np.array(ranks.sum(padded)[: step.size])
    parts = whole = None
    if ranks.rank == 0:
        samples = [make_samples(spec, rank, size, example, step) for rank, size in enumerate(sizes)]
        parts = _difference(step, total, sum(np.array(step.local(*one), np.float64) for one in samples))
        if not step.mixes_samples:
            together = [np.concatenate(column) for column in zip(*samples, strict=True)]
            whole = _difference(step, total, np.array(step.local(*together), np.float64))
    step.apply(total)
    digest = hash_weights(step.model)
    if len(set(ranks.gather(digest))) > 1:
        raise WorkerError(
            "the ranks hold different weights after one step",
            remedy="look for a failing memory or differing TensorFlow versions: `csdctl discover`",
        )
    if ranks.rank == 0:
        emit(
            Verified(
                me.rank, me.node, sum(sizes), tuple(sizes), parts or 0.0, whole, digest, ranks.collective
            )
        )
    return digest


def verified_samples(batch_size: int) -> int:
    """How many samples a rank with this batch size takes."""
    return min(batch_size, MAX_SAMPLES)


def make_samples(
    spec: RunSpec, rank: int, count: int, example: tuple[Array, Array], step: Step
) -> tuple[Array, Array]:
    """Random samples of rank `rank`, the same on every machine.

    Small labels are frequent: with even classes the gradients of an untrained model cancel, and a relative
    difference would show the rounding inside the kernels.
    """
    generator = np.random.default_rng([spec.recipe.seed, rank])
    images, labels = example
    made = random_samples(generator, (count, *images.shape[1:]), images.dtype)
    if labels.dtype.kind in "iu":
        num_classes = max(1, int(step.model.output_shape[-1]))
        skewed = np.minimum(generator.geometric(0.6, (count, *labels.shape[1:])) - 1, num_classes - 1)
        return made, skewed.astype(labels.dtype)
    if labels.ndim == 2 and labels.shape[1] > 1:  # one-hot
        chosen = np.minimum(generator.geometric(0.6, count) - 1, labels.shape[1] - 1)
        return made, np.eye(labels.shape[1], dtype=labels.dtype)[chosen]
    return made, generator.random((count, *labels.shape[1:])).astype(labels.dtype)


def _difference(step: Step, found: Array, expected: Any) -> float:
    """The relative difference of two mean gradients, in the Euclidean norm."""
    ours = found[: step.num_gradients].astype(np.float64) / found[-1]
    theirs = np.asarray(expected)[: step.num_gradients] / expected[-1]
    norm = float(np.linalg.norm(theirs))
    return float(np.linalg.norm(ours - theirs)) / (norm or 1.0)
