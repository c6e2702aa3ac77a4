"""Verification: one step of all ranks against one process, on the user's own model and fleet.

Two questions are answered apart from each other. Is the sum that the ranks apply the sum of what each of them
computed? Each rank also sends its vector to rank 0, which adds them in float64. And has each rank computed
what one process computes from the same samples? Rank 0 does that, with each rank's random states
(reference.py). Where rounding hides a sample, all ranks compute the same step in a finer type, and are
compared in that one.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from csdctl.worker.compute.model import hash_weights
from csdctl.worker.data.arrays import Array
from csdctl.worker.group.channel import PeerFaultError
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import as_hash
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.process.output import emit
from csdctl.worker.protocol.events import STATE, VERIFIED, Verified
from csdctl.worker.tasks.model_task import ModelTask
from csdctl.worker.tasks.precision import compute_type, computing_in, types_to_compare_in
from csdctl.worker.tasks.reference import ExactSum, Reference, Snapshot
from csdctl.worker.tasks.task import Group, TaskOutcome
from csdctl.worker.tasks.verified_samples import (
    Ranges,
    as_ranges,
    draw_samples,
    find_ranges,
    verified_sizes,
)

NUM_LOOKED_AT = 64
"""Samples of rank 0 that tell the ranges of values."""


class Verify(ModelTask):
    """Takes one step, and compares its gradient with that of one process."""

    is_resumable = False
    _weights_hash = ""
    _limits: Ranges

    def example(self, count: int) -> tuple[Array, Array]:
        """Return at most `count` samples; of the head of a model, features."""
        samples, labels = super().example(count)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def run(self, group: Group) -> TaskOutcome:
        """Take the step; raises WorkerError when ranks are missing, or hold different weights after it."""
        self._check_complete(group)
        communicator, step = group.communicator, self.step
        self._sizes = verified_sizes([rank.batch_size for rank in self.spec.ranks])
        self._ranges = communicator.allgather(self._find_ranges() if self.is_root else {}, as_ranges)[0]
        self._start = Snapshot(self.whole_model.variables)
        own = np.zeros_like(communicator.local)
        own[self.layout.step] = vector = self._compute()
        after = Snapshot(step.model.variables)
        total = np.array(communicator.sum(own)[self.layout.step])
        verified = self._compare(communicator, vector, total)
        after.restore()
        step.apply(total)
        self._check_weights(communicator)
        if verified:
            emit(replace(verified, weights_hash=self._weights_hash))
        return TaskOutcome(is_finished=True, reason=VERIFIED)

    def finish(self, reason: str) -> None:
        """Report the completion record."""
        self.reporter.finished(self.progress.position, self._weights_hash, None, reason)

    def _check_complete(self, group: Group) -> None:
        if missing := [rank.node for rank in self.spec.ranks if rank.rank not in group.ranks]:
            raise WorkerError(
                f"verification needs all ranks of the plan, and {', '.join(missing)} is lost",
                remedy="examine it with `csdctl doctor`, or leave it out with --exclude",
            )

    def _find_ranges(self) -> Ranges:
        """Return the ranges of the samples, by those of this rank."""
        return find_ranges(self.reader.first(NUM_LOOKED_AT)[0])

    def _draw(self, rank: int, count: int) -> tuple[Array, Array]:
        """Return the random samples of a rank; of the head of a model, their features."""
        seed, example = self.spec.recipe.seed, self.reader.empty_batch()
        samples, labels = draw_samples(seed, rank, count, example, self.whole_model, self._ranges)
        return (self.to_features(samples) if self.spec.head else samples), labels

    def _compute(self) -> Array:
        """Return this rank's vector, computed from the weights of the beginning."""
        recipe, me, step = self.spec.recipe, self.me, self.step
        self._start.restore()
        step.set_step(0, recipe.learning_rate or 0.0)
        step.micro_batch_size = me.micro_batch_size
        return np.array(step.local(*self._draw(me.rank, self._sizes[me.rank])))

    def _compare(self, communicator: Communicator, vector: Array, total: Array) -> Verified | None:
        """Compare the sum of all ranks, and each rank's vector; returns the result on rank 0."""
        exact = ExactSum(total.size)
        for sent in _gather(communicator, vector):
            exact.add(sent)
        dtype, compared_in, reference = compute_type(self.step.model), "", None
        for finer in types_to_compare_in(dtype):
            with computing_in(self.step, finer):
                problem = ""
                if finer != dtype:
                    vector, problem = self._try_to_compute(vector)
                if not all(communicator.allgather(not problem, _as_bool)):
                    break
                compared_in, reference = finer, self._compare_ranks(communicator, vector)
            is_sharp = reference is None or reference.is_sharp
            if communicator.allgather(is_sharp, _as_bool)[0]:
                break
        if not compared_in:
            raise WorkerError(
                f"rounding in {dtype} hides a sample, and the model cannot be computed in float32: "
                f"{problem or 'not on all ranks'}",
                remedy="take types from `self.compute_dtype` in your layers",
            )
        if reference is None:
            return None
        return Verified(
            *(self.me.rank, self.me.node, sum(self._sizes), tuple(self._sizes), dtype),
            exact.difference(total),
            exact.rounding,
            compared_in,
            tuple(reference.of_ranks),
            reference.by_parts,
            reference.one_batch,
            reference.not_one_batch,
            self._weights_hash,
            communicator.collective,
        )

    def _try_to_compute(self, otherwise: Array) -> tuple[Array, str]:
        """Return this rank's vector and "", or `otherwise` and why layers cannot compute in this type."""
        try:
            return self._compute(), ""
        except Exception as error:  # of any kind: layers of the user's own
            return otherwise, describe(error)

    def _compare_ranks(self, communicator: Communicator, vector: Array) -> Reference | None:
        """Compare each rank's vector, on rank 0; `vector` is this rank's."""
        self._start.restore()
        reference = self._make_reference() if self.is_root else None
        for sent in _gather(communicator, vector):
            if reference:
                reference.compare(sent)
        if reference:
            reference.compare_one_batch()
        return reference

    def _make_reference(self) -> Reference:
        seed = self.spec.recipe.seed
        return Reference(self.step, seed, self.spec.ranks, self._sizes, self._draw, self.me.weight)

    def _check_weights(self, communicator: Communicator) -> None:
        self._weights_hash = hash_weights(self.summed.model)
        hashes = communicator.allgather(self._weights_hash, as_hash)
        if different := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
            nodes = ", ".join(self.spec.ranks[rank].node for rank in different)
            raise WorkerError(
                f"after one step the weights of {nodes} differ from rank 0's",
                remedy="check for failing memory or different TensorFlow versions: `csdctl discover`",
            )


def _gather(communicator: Communicator, vector: Array) -> Iterator[Array]:
    """Send `vector` to rank 0, which yields those of all ranks, in their order, its own first."""
    if communicator.rank:
        communicator.send(0, vector, STATE)
        return
    yield vector
    for rank in range(1, communicator.size):
        received = communicator.receive(rank, vector.nbytes, STATE)
        if len(received) != vector.nbytes:
            raise PeerFaultError(rank, f"sent {len(received)} bytes, expected {vector.nbytes}")
        yield np.frombuffer(received, vector.dtype)


def _as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected true or false")
    return value
