"""The ranks of a tuning run measure what csdctl orders: batch sizes of single ranks, or steps of a plan.

One run serves a whole tuning: processes start once, and so do their links. Samples are random, because the
time of a step does not depend on them. Nothing is saved.
"""

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.schedule import OwnSamples
from csdctl.worker.engine.tensorflow_c import OUT_OF_MEMORY, TensorFlowError
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.process.machine import measure_time, peak_memory_bytes
from csdctl.worker.protocol.events import STOPPED, Probed, SaveTimed, SumTimed
from csdctl.worker.protocol.orders import Probe, ProbeRequest, TakeSteps, order_from_line, order_to_line
from csdctl.worker.tasks.balancer import Balancer
from csdctl.worker.tasks.checkpointer import Checkpoints
from csdctl.worker.tasks.progress import EpochTotals, pack
from csdctl.worker.tasks.split import Split
from csdctl.worker.tasks.task import Task
from csdctl.worker.tasks.train import Train

NUM_TIMED_SUMS = 4
POLL_S = 0.05


class Trial(Train):
    """Measures on random samples of the form in the task's argument `element_spec`."""

    values: Sequence[Array] = ()
    """None: the weights of a trial are not trained, and differ between ranks after probes."""
    finish = Task.finish

    def exchange_reassigned(self, communicator: Communicator) -> None:
        """Do nothing: samples are random."""

    def run(self, communicator: Communicator) -> str:
        """Carry out the orders until `Stop`."""
        while line := communicator.gather(self._next_order(communicator), str)[0]:
            order = order_from_line(line)
            if isinstance(order, Probe):
                if request := order.requests.get(str(self.me.rank)):
                    measured = self.measure(request)
                    self.reporter.emit(Probed, request.batch_size, *measured, peak_memory_bytes())
                communicator.gather(None, type(None))  # a rank that hangs is waited for, and named
            elif isinstance(order, TakeSteps):
                self._take_steps(communicator, order)
        return STOPPED

    def _next_order(self, communicator: Communicator) -> str:
        while self.is_root and not self.orders.is_stopping:
            communicator.look()
            with suppress(queue.Empty):
                return order_to_line(self.orders.measurements.get(timeout=POLL_S))
        return ""

    def measure(self, request: ProbeRequest) -> tuple[float | None, int]:
        """Return the mean seconds of forward, backward and apply of one batch, and the number of steps.

        None: the batch does not fit in memory.
        """
        step, size = self.step, request.batch_size
        step.micro_batch_size = None
        step.set_step(0, 0.0)
        # The step of private samples, with noise, takes longer.
        copies = np.ones(size, np.int64) if step.has_noise and self.me.num_private else None
        try:
            return measure_time(
                partial(step.alone, *self.example(size), private_copies=copies),
                request.min_duration_s,
                num_warm_ups=request.warm_up_steps,
                min_count=request.min_steps,
            )
        except (TensorFlowError, MemoryError) as error:
            if isinstance(error, TensorFlowError) and error.code != OUT_OF_MEMORY:
                raise
        return None, 0

    def _take_steps(self, communicator: Communicator, order: TakeSteps) -> None:
        """Train for an epoch of the steps in `order`, after the sums of a step were timed."""
        progress, me = self.progress, order.ranks[self.me.rank]
        self.step.micro_batch_size = me.micro_batch_size
        limits = {number: rank.max_batch_size for number, rank in enumerate(order.ranks)}
        self.balancer = Balancer(limits) if order.is_balanced else None
        progress.samples = [OwnSamples(rank.num_private, rank.num_public) for rank in order.ranks]
        progress.position = replace(
            progress.position,
            step=0,
            segment=None,
            totals=EpochTotals(),
            batch_sizes={str(number): rank.batch_size for number, rank in enumerate(order.ranks)},
        )
        progress.regroup(communicator.members)
        self.example(me.batch_size)
        if not communicator.is_alone:
            self._time_sums(communicator)
        self.apply_s = 0.0
        self._run_epoch(communicator)
        self._report_epoch_end({})
        progress.position = replace(progress.position, epoch=progress.position.epoch + 1)
        self.reporter.traffic(communicator)
        if self.is_root:
            self._time_saving()
        self.reporter.emit(Probed, me.batch_size, None, 0, peak_memory_bytes())

    def _time_saving(self) -> None:
        """Time a checkpoint in the run directory, which csdctl removes. Without space, nothing is timed."""
        checkpoints, began = Checkpoints(Path(self.spec.output_directory)), time.perf_counter()
        with suppress(OSError):
            checkpoints.save(pack(self.step.values, self.progress.position), self.progress.position)
            self.reporter.emit(SaveTimed, round(time.perf_counter() - began, 6))

    def _time_sums(self, communicator: Communicator) -> None:
        seconds = []
        communicator.local[:] = 0
        for _ in range(NUM_TIMED_SUMS):
            communicator.gather(None, type(None))
            began = time.perf_counter()
            for _ in self.sum_sizes:
                communicator.sum(communicator.local)
            seconds.append(time.perf_counter() - began)
        if self.is_root:
            num_bytes = sum(4 * size for size, _ in self.sum_sizes)
            self.reporter.emit(SumTimed, communicator.members, num_bytes, round(min(seconds), 6))


class SplitTrial(Split, Trial):
    """The same with a model that is cut in two."""
