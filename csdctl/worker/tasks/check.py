"""The check of links: ranks without a model join one after another, and time sums."""

import contextlib
import time
from collections.abc import Sequence

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import StepVoidError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.events import SumTimed
from csdctl.worker.protocol.run_spec import SUM_BYTES, SUM_RANKS
from csdctl.worker.tasks.task import FINISHED, Task, TaskContext

NUM_SUMS = 5
LONG_SUMS_S = 5.0
"""Sums that together take longer are timed once."""
POLL_S = 0.05
ADMIT, SUM, END = "admit", "sum", "end"
"""What the ranks do next."""


class SumCheck(Task):
    """Sums vectors of the sizes in the task's argument `sum_bytes`, over all ranks that have joined.

    They are also timed when as many ranks have joined as the argument `sum_ranks` says. Rank 0 begins by
    itself, admits each rank that joins, and ends when it is asked to stop.
    """

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        arguments = context.spec.task.arguments
        self._sizes = [max(1, int(num_bytes) // 4) for num_bytes in arguments[SUM_BYTES]]
        self._stages = {int(num_ranks) for num_ranks in arguments.get(SUM_RANKS, ())}
        self._num_timed = 1
        """The ranks over which sums were timed last."""

    @property
    def sum_sizes(self) -> list[tuple[int, int]]:
        """As in `Task`."""
        return [(size, 0) for size in self._sizes]

    def run(self, communicator: Communicator) -> str:
        """Admit, sum and end as rank 0 decides. Raises WorkerError for a sum that is wrong."""
        while True:
            before = communicator.members
            action = communicator.gather(self._decide(communicator), str)[0]
            if action == SUM:
                with contextlib.suppress(StepVoidError):  # a rank was lost: again without it
                    self._time_sums(communicator)
            if before != communicator.members or communicator.admitted or communicator.lost:
                self.settle(communicator, before)
            if action == END:
                return FINISHED

    def _decide(self, communicator: Communicator) -> str:
        while self.is_root:
            communicator.look()
            num_ranks = len(communicator.members)
            if num_ranks in self._stages and num_ranks > self._num_timed:
                return SUM
            if communicator.joining:
                limit = min((stage for stage in self._stages if stage > num_ranks), default=None)
                communicator.admit(sorted(communicator.joining)[: limit and limit - num_ranks])
                return ADMIT
            if self.orders.is_stopping:
                return SUM if num_ranks > self._num_timed else END
            if communicator.lost:
                return ADMIT
            time.sleep(POLL_S)
        return ""

    def _time_sums(self, communicator: Communicator) -> None:
        members = communicator.members
        fastest_s = [float("inf")] * len(self._sizes)
        total_s = 0.0
        for number in range(NUM_SUMS):
            is_over = bool(number) and total_s > LONG_SUMS_S
            if communicator.gather(is_over, bool)[0]:
                break
            for at, size in enumerate(self._sizes):
                communicator.local[:size] = self.me.rank + 1
                began = time.perf_counter()
                total = communicator.sum(communicator.local)
                elapsed_s = time.perf_counter() - began
                self._check_sum(total[:size], communicator.counted)
                fastest_s[at] = min(fastest_s[at], elapsed_s)
                total_s += elapsed_s
        if communicator.members != members:
            return
        self._num_timed = len(members)
        if self.is_root:
            for size, seconds in zip(self._sizes, fastest_s, strict=True):
                self.reporter.emit(SumTimed, members, 4 * size, round(seconds, 6))

    def _check_sum(self, total: Array, ranks: Sequence[int]) -> None:
        expected = np.float32(sum(rank + 1 for rank in ranks))
        if not (total == expected).all():
            wrong = total[total != expected]
            raise WorkerError(
                f"a sum over ranks is {wrong[0]:g} in {len(wrong)} of {len(total)} elements, "
                f"expected {expected:g}",
                remedy="check the memory and the network of the machines",
            )
