"""An example of a new task: sums the ranks' sample counts step by step, without a model."""

import signal
import time

from csdctl.worker.compute.step import Sums
from csdctl.worker.process.output import emit
from csdctl.worker.protocol.events import EpochEnd
from csdctl.worker.tasks.task import FINISHED, Group, TaskContext

STEP_S = 0.05
HALTED = "halted"
"""Argument of the task: the node that stops in the middle of the epoch, and is then lost."""


class Count:
    """Counts the samples that all ranks read in one epoch."""

    is_resumable = True
    sum_sizes = ((1, 0),)
    variables: tuple[object, ...] = ()

    def __init__(self, context: TaskContext) -> None:
        self._me, self._progress, self._reporter = context.me, context.progress, context.reporter
        self._is_halted = context.spec.task.arguments[HALTED] == context.me.node

    def load(self) -> None:
        """Do nothing: there is nothing to load."""

    def run(self, group: Group) -> str:
        """Count until the epoch ends."""
        progress, communicator = self._progress, group.communicator
        while progress.position.step < progress.segment.stop_step:
            time.sleep(STEP_S)
            if self._is_halted and 2 * progress.position.step >= progress.segment.stop_step:
                signal.pause()
            vector = communicator.local
            vector[:] = progress.share_of(self._me.rank).num_samples
            total = float(communicator.sum(vector)[0])
            progress.end_step(Sums(0.0, (), total), sum(progress.step_samples))
        return FINISHED

    def finish(self, reason: str) -> None:
        """Report how many samples were summed, and how many the schedule has."""
        totals = self._progress.position.totals
        me = self._me
        of_all = totals.samples if me.rank == 0 else 0
        emit(EpochEnd(me.rank, me.node, 1, totals.steps, int(totals.weight), 0.0, 0.0, 0.0, "", of_all))
        self._reporter.finished(self._progress.position, "", None, reason)
