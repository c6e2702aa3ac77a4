"""An example of a new task: sums the ranks' sample counts step by step, without a model."""

import signal
import time
from collections.abc import Mapping, Sequence

from csdctl.worker.engine.layout import Sums
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.protocol.events import EpochEnd, Joined
from csdctl.worker.tasks.task import FINISHED, TaskContext

STEP_S = 0.05
HALTED = "halted"
"""Argument of the task: the node that stops in the middle of the epoch, and is then lost."""


class Count:
    """Counts the samples that all ranks read in one epoch; a rank that is lost does not come back."""

    sum_sizes = ((1, 0),)
    values: tuple[object, ...] = ()
    max_message_bytes = 0

    def __init__(self, context: TaskContext) -> None:
        self._me, self._progress, self._reporter = context.me, context.progress, context.reporter
        self._is_halted = context.spec.task.arguments[HALTED] == context.me.node

    def load(self) -> None:
        """Do nothing: there is nothing to load."""

    def settle(
        self, communicator: Communicator, before: Sequence[int], hashes: Mapping[int, str] = {}
    ) -> None:
        """Divide the rest of the epoch among the ranks that are left."""
        progress, members = self._progress, communicator.members
        if members == before:
            return
        progress.regroup(members, set(before) - set(communicator.counted))
        if self._me.rank:
            return
        lost = tuple((rank, reason) for rank, reason, _ in communicator.lost)
        sizes = {str(share.rank): share.batch_size for share in progress.segment.shares}
        step, stop = progress.position.step, progress.segment.stop_step
        self._reporter.emit(Joined, 1, step, stop, step, sizes, not before, lost, progress.num_lost())
        for rank in sorted(communicator.admitted):
            communicator.give_state(rank, b"")

    def run(self, communicator: Communicator) -> str:
        """Count until the epoch ends."""
        progress = self._progress
        while progress.position.step < progress.segment.stop_step:
            time.sleep(STEP_S)
            if self._is_halted and 2 * progress.position.step >= progress.segment.stop_step:
                signal.pause()
            vector, members = communicator.local, communicator.members
            samples = dict(zip(members, progress.step_samples, strict=True))
            vector[:] = progress.share_of(self._me.rank).num_samples
            total = float(communicator.sum(vector)[0])
            progress.end_step(Sums(0.0, (), total), sum(samples[rank] for rank in communicator.counted))
            self.settle(communicator, members)
        return FINISHED

    def finish(self, reason: str) -> None:
        """Report how many samples were summed, and how many the schedule has."""
        totals = self._progress.position.totals
        self._reporter.emit(
            EpochEnd,
            epoch=1,
            steps=totals.steps,
            samples=int(totals.weight),
            wall_s=0.0,
            compute_s=0.0,
            wait_s=0.0,
            weights_hash="",
            global_samples=totals.samples if self._me.rank == 0 else 0,
        )
        self._reporter.finished(self._progress.position, "", None, reason)
