"""Verification: one step of all ranks against one process, on the user's own model and fleet.

Samples are random, drawn from (seed, rank) wherever they are needed: no private sample is sent, and rank 0
can repeat the computation of all ranks.
"""

from typing import Any

import numpy as np

from csdctl.worker.compute.model import hash_weights
from csdctl.worker.compute.step import Step
from csdctl.worker.compute.vector import VectorLayout
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.element_spec import random_samples
from csdctl.worker.group.tails import ExpectedTails
from csdctl.worker.group.values import as_hash
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.events import emit
from csdctl.worker.protocol.events import VERIFIED, Verified
from csdctl.worker.tasks.model_task import ModelTask
from csdctl.worker.tasks.task import Group, TaskOutcome

MAX_SAMPLES = 32
"""Per rank: enough for unequal batches, and few enough for rank 0 to compute for all ranks."""


class Verify(ModelTask):
    """Takes one step, and compares its gradient with that of one process."""

    is_resumable = False

    def run(self, group: Group) -> TaskOutcome:
        """Take the step; raises WorkerError when the ranks hold different weights after it."""
        communicator, step = group.communicator, self.step
        sizes = [num_verified_samples(rank.batch_size) for rank in self.spec.ranks]
        step.set_step(0, self.spec.recipe.learning_rate or 0.0)
        padded = np.zeros_like(communicator.local)
        padded[self.layout.step] = np.array(step.local(*self._draw_samples(self.me.rank, sizes)))
        expected = ExpectedTails(self.layout.count, list(group.ranks), [float(size) for size in sizes])
        total = np.array(communicator.sum(padded, expected if self.is_root else None)[self.layout.step])
        by_parts, as_one_batch = self._compare(total, sizes) if self.is_root else (None, None)
        step.apply(total)
        self._weights_hash = hash_weights(step.model)
        hashes = communicator.allgather(self._weights_hash, as_hash)
        if different := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
            nodes = ", ".join(self.spec.ranks[group.ranks[rank]].node for rank in different)
            raise WorkerError(
                f"after one step the weights of {nodes} differ from rank 0's",
                remedy="check for failing memory or different TensorFlow versions: `csdctl discover`",
            )
        if self.is_root:
            emit(
                Verified(
                    self.me.rank,
                    self.me.node,
                    sum(sizes),
                    tuple(sizes),
                    by_parts or 0.0,
                    as_one_batch,
                    self._weights_hash,
                    communicator.collective,
                )
            )
        return TaskOutcome(is_finished=True, reason=VERIFIED)

    def finish(self, reason: str) -> None:
        """Report the completion record."""
        self.reporter.finished(self.progress.position, self._weights_hash, None, reason)

    def _draw_samples(self, rank: int, sizes: list[int]) -> tuple[Array, Array]:
        return draw_samples(self.spec.recipe.seed, rank, sizes[rank], self.reader.empty_batch(), self.step)

    def _compare(self, total: Array, sizes: list[int]) -> tuple[float, float | None]:
        """Return the relative differences to all batches in turn, and to one batch of all samples."""
        step, layout = self.step, self.step.layout
        batches = [self._draw_samples(rank, sizes) for rank in range(len(sizes))]
        in_turn = sum(np.array(step.local(*batch), np.float64) for batch in batches)
        as_one_batch = None
        if not step.mixes_samples:
            together = [np.concatenate(column) for column in zip(*batches, strict=True)]
            as_one_batch = _difference(layout, total, np.array(step.local(*together), np.float64))
        return _difference(layout, total, in_turn), as_one_batch


def num_verified_samples(batch_size: int) -> int:
    """Return how many samples a rank with this batch size takes."""
    return min(batch_size, MAX_SAMPLES)


def draw_samples(
    seed: int, rank: int, count: int, example: tuple[Array, Array], step: Step
) -> tuple[Array, Array]:
    """Return random samples of rank `rank`, the same on every machine.

    Small labels are frequent: with balanced classes the gradients of an untrained model cancel, and a
    relative difference would show the rounding inside the kernels.
    """
    generator = np.random.default_rng([seed, rank])
    images, labels = example
    drawn = random_samples(generator, (count, *images.shape[1:]), images.dtype)
    if labels.dtype.kind in "iu":
        num_classes = max(1, int(step.model.output_shape[-1]))
        skewed = np.minimum(generator.geometric(0.6, (count, *labels.shape[1:])) - 1, num_classes - 1)
        return drawn, skewed.astype(labels.dtype)
    if labels.ndim == 2 and labels.shape[1] > 1:  # one-hot
        chosen = np.minimum(generator.geometric(0.6, count) - 1, labels.shape[1] - 1)
        return drawn, np.eye(labels.shape[1], dtype=labels.dtype)[chosen]
    return drawn, generator.random((count, *labels.shape[1:])).astype(labels.dtype)


def _difference(layout: VectorLayout, found: Array, expected: Any) -> float:
    """Return the relative difference of two mean gradients, in the Euclidean norm."""
    ours = found[layout.gradients].astype(np.float64) / found[layout.count]
    theirs = np.asarray(expected)[layout.gradients] / expected[layout.count]
    norm = float(np.linalg.norm(theirs))
    return float(np.linalg.norm(ours - theirs)) / (norm or 1.0)
