"""Verification of a model that is cut in two, against one process with the whole model.

The ranks compute a step one after the other, together with rank 0, so that the gradient of each is known;
then all at once.
"""

from dataclasses import replace

import numpy as np

from csdctl.worker.compute.split import SplitStep, micro_batch_size
from csdctl.worker.data.arrays import Array
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.process.output import emit
from csdctl.worker.protocol.events import VERIFIED, Verified
from csdctl.worker.tasks.precision import compute_type
from csdctl.worker.tasks.reference import ExactSum, Reference, Snapshot
from csdctl.worker.tasks.split import SplitParts
from csdctl.worker.tasks.task import Group, TaskOutcome
from csdctl.worker.tasks.verified_samples import as_ranges, verified_sizes
from csdctl.worker.tasks.verify import Verify


class VerifySplit(SplitParts, Verify):
    """Takes one step through the cut, and compares its gradient with that of one process."""

    def run(self, group: Group) -> TaskOutcome:
        """Take the step; raises WorkerError when ranks are missing, or hold different weights after it."""
        self._check_complete(group)
        communicator, split = group.communicator, self._split
        self._sizes = verified_sizes([rank.batch_size for rank in self.spec.ranks])
        self._ranges = communicator.allgather(self._find_ranges() if self.is_root else {}, as_ranges)[0]
        self._start = Snapshot(self.whole_model.variables)
        reference = self._make_reference() if self.is_root else None
        exact = ExactSum(split.layout.statistics.stop)
        for number in range(len(self._sizes)):
            counts = [size if rank == number else 0 for rank, size in enumerate(self._sizes)]
            total = self._sum_of(communicator, counts)
            exact.add(total[: split.layout.statistics.stop])
            if reference and isinstance(split, SplitStep):
                reference.compare(split.vector(total).astype(np.float64))
        total = self._sum_of(communicator, self._sizes)
        verified = None
        if reference and isinstance(split, SplitStep):
            reference.take_sum(split.vector(total).astype(np.float64))
            reference.compare_one_batch()
            verified = self._describe(exact, reference, total, communicator.collective)
        self._start.restore()
        split.apply(total)
        self._check_weights(communicator)
        if verified:
            emit(replace(verified, weights_hash=self._weights_hash))
        return TaskOutcome(is_finished=True, reason=VERIFIED)

    def finish(self, reason: str) -> None:
        """Measure what activations reveal, and report the completion record."""
        self.measure_inversion()
        super().finish(reason)

    def _sum_of(self, communicator: Communicator, counts: list[int]) -> Array:
        """Return the summed vector of a step from the beginning, in which the ranks have `counts` samples."""
        recipe, me, layout = self.spec.recipe, self.me, self.layout
        self._start.restore()
        self._split.set_step(0, recipe.learning_rate or 0.0)
        samples, labels = (part[: counts[me.rank]] for part in self._draw(me.rank, counts[me.rank]))
        vector = np.zeros_like(communicator.local)
        ranks = [rank.rank for rank in self.spec.ranks]
        self.exchange(communicator, (samples, labels), ranks, counts, vector[layout.step])
        return np.array(communicator.sum(vector)[layout.step])

    def _make_reference(self) -> Reference:
        assert self.spec.split
        number = self.spec.split.num_micro_batches
        ranks = [
            replace(rank, micro_batch_size=micro_batch_size(size, number, rank.micro_batch_size))
            for rank, size in zip(self.spec.ranks, self._sizes, strict=True)
        ]
        # The vectors of a split step have every rank's own weight; those of the whole model rank 0's.
        return Reference(self.step, self.spec.recipe.seed, ranks, self._sizes, self._draw, self.me.weight)

    def _describe(self, exact: ExactSum, reference: Reference, total: Array, collective: str) -> Verified:
        dtype = compute_type(self.step.model)
        return Verified(
            *(self.me.rank, self.me.node, sum(self._sizes), tuple(self._sizes), dtype),
            exact.difference(total[: self._split.layout.statistics.stop]),
            exact.rounding,
            dtype,
            tuple(reference.of_ranks),
            reference.by_parts,
            reference.one_batch,
            reference.not_one_batch,
            "",
            collective,
        )
