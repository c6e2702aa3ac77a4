"""One run that measures a fleet: its ranks load the model once, and measure what they are ordered to.

In a probe, each rank takes steps by itself, all at the same time: resources that machines share in training
(the host's cores, the tunnel, the power limit) then show in the measurement. In a trial, the ranks take a few
steps together.

The speed of single machines does not predict the fleet: ranks wait for the slowest of many noisy steps, and
for the sum. Trials have the links, the sums and the processes of a training run. Samples are random. No data
is read, and no output is kept.
"""

import queue
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from csdctl.errors import NodeError, RunError
from csdctl.fleet.names import format_node_names
from csdctl.reporting.tally import Amounts, Tally
from csdctl.supervision.rank_processes import CHECK_WORKER
from csdctl.supervision.run_setup import Patience
from csdctl.tuning.fleet_model import TrialResult
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import (
    TRIED,
    EpochEnd,
    Event,
    Joined,
    Probed,
    Rebalanced,
    SaveTimed,
    SumTimed,
)
from csdctl.worker.protocol.orders import Order, Probe, ProbeRequest, Stop, TakeSteps, TrialShard
from csdctl.worker.protocol.run_spec import GROWTH_LIMIT, TRIAL, TRIAL_SPLIT
from csdctl.worker.protocol.statistics import standard_error
from csdctl.workflows.train import resolved
from csdctl.workflows.train.request import TrainOptions
from csdctl.workflows.train.resolved import ResolvedRun, RunContext, RunModel
from csdctl.workflows.train.run import build_spec, run_ranks
from csdctl.workflows.train.strategies import cut_model
from csdctl.workflows.workspace.event_stream import EventStream

PROBE_DEADLINE_S = 600.0
OPTIONS = TrainOptions(
    deadlines=Patience(silence_s=2 * PROBE_DEADLINE_S, poll_s=0.05, max_restarts=0), is_balanced=False
)
"""Options of a tuning run, which neither waits for lost ranks nor changes batch sizes."""


class TuningRun:
    """Ranks that measure what they are ordered to. A context manager, which ends them.

    Calls raise what `train` raises for a run that fails, such as OutOfMemoryError for a rank that was killed.
    """

    def __init__(self, ranks: Sequence[RankPlan], context: RunContext, cut: str = "") -> None:
        """Start the ranks, with their batch sizes. `cut`: the last layer on nodes, '' for a whole model."""
        self.ranks, self._context = ranks, context
        self._directory = context.space.project.new_run(is_scratch=True)
        self._resolved = self._resolve(cut)
        # As in a training run, rank 0 saves the state of every step, which takes time.
        step_file = str(context.space.project.step_file(self._directory))
        self._spec = replace(build_spec(self._resolved, self._directory, OPTIONS), step_file=step_file)
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self.probed: list[Probed] = []
        """Measurements of the ranks since the latest order."""
        self._is_aborted = threading.Event()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        began = time.monotonic()
        self._thread.start()
        try:
            self._await(Joined, [0])
        except BaseException as error:
            self.__exit__(error)
            raise
        self.start_s = time.monotonic() - began

    def __enter__(self) -> "TuningRun":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._is_aborted.set()
        else:
            self._orders.put(Stop())
        self._thread.join()

    def probe(self, requests: Mapping[str, ProbeRequest]) -> list[Probed]:
        """Measure steps of these machines, all at the same time. Return what each has measured."""
        by_rank = {
            str(number): requests[rank.node]
            for number, rank in enumerate(self.ranks)
            if rank.node in requests
        }
        self._orders.put(Probe(by_rank))
        self._await(Probed, [int(rank) for rank in by_rank])
        for probed in self.probed:
            expected = requests[probed.node].batch_size if probed.node in requests else "nothing"
            if probed.batch_size != expected or (probed.step_time_s or 0.0) > PROBE_DEADLINE_S:
                received = f"{probed.step_time_s} s for {probed.batch_size} samples"
                raise NodeError(
                    f"measured {received}, expected {expected}", node=probed.node, remedy=CHECK_WORKER
                )
        return self.probed

    def take_steps(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        """Take steps with all ranks, with the batch sizes of `ranks`, which are on the same nodes.

        A step before them does not count. The first step with a batch size takes up to four times as long:
        it allocates memory and chooses kernels.
        """
        self._take_steps(ranks, 1)
        return read_trial(self._take_steps(ranks, num_steps), [rank.node for rank in ranks])

    def balance(self, ranks: Sequence[RankPlan], num_steps: int) -> list[int]:
        """Take steps in which batch sizes change, as in training. Return the batch sizes that were kept."""
        sizes = [rank.batch_size for rank in ranks]
        for event in self._take_steps(ranks, num_steps, is_balanced=True):
            if isinstance(event, Rebalanced) and event.outcome != TRIED:
                sizes = [event.batch_sizes[str(number)] for number in range(len(ranks))]
        return sizes

    def _take_steps(
        self, ranks: Sequence[RankPlan], num_steps: int, *, is_balanced: bool = False
    ) -> list[Event]:
        context = self._context
        placed = resolved.place_plan(ranks, context.prepared, context.job, context.space.fleet)
        shards = []
        for rank, shard in zip(ranks, placed, strict=True):
            num_samples = rank.batch_size * num_steps
            # Matters only with noise, when each private sample has a gradient of its own.
            num_private = num_samples * shard.num_private // max(1, shard.num_samples)
            num_public = num_samples - num_private
            most = rank.max_batch_size or GROWTH_LIMIT * rank.batch_size
            shards.append(
                TrialShard(rank.batch_size, most, rank.micro_batch_size, num_private, num_public=num_public)
            )
        self._orders.put(TakeSteps(tuple(shards), is_balanced))
        return self._await(Probed, range(len(ranks)))

    def _await(self, kind: type[Event], ranks: Sequence[int]) -> list[Event]:
        """Return all events until each of `ranks` has sent one of this kind, the last from a rank."""
        self.probed, events, waiting = [], list[Event](), {*ranks}
        while waiting:
            event = self._events.get()
            if isinstance(event, BaseException):
                self._events.put(event)  # for the next call
                raise event
            events.append(event)
            if isinstance(event, Probed):
                self.probed.append(event)
            if isinstance(event, kind):
                waiting.discard(event.rank)
        return events

    def _take(self, event: object) -> None:
        if isinstance(event, Event):
            self._events.put(event)

    def _supervise(self) -> None:
        options, events = replace(OPTIONS, min_nodes=len(self.ranks) - 1), EventStream((self._take,))
        run = self._resolved, self._spec, self._directory
        try:
            run_ranks(*run, options, events, next_order=self._next_order)
            shutil.rmtree(self._directory.path, ignore_errors=True)
            self._events.put(RunError("the ranks have ended before they had measured what was asked for"))
        except BaseException as error:  # raised again by the thread that waits for events
            self._events.put(error)
        finally:
            Path(self._spec.step_file).unlink(missing_ok=True)

    def _next_order(self) -> Order | None:
        if self._is_aborted.is_set():
            raise KeyboardInterrupt
        with suppress(queue.Empty):
            return self._orders.get_nowait()
        return None

    def _resolve(self, cut: str) -> ResolvedRun:
        """Return a run of random samples, in which nothing is learned, saved or balanced."""
        context, prepared = self._context, self._context.prepared
        # Random labels teach nothing: a learning rate of 0 keeps the weights, and keeps them finite.
        recipe = replace(
            prepared.recipe,
            epochs=1,
            learning_rate=0.0,
            schedule="",
            early_stopping=None,
            reduce_on_plateau=None,
        )
        model = cut_model(context, cut) if cut else RunModel(prepared.model, prepared.model)
        task, form = TRIAL_SPLIT if cut else TRIAL, prepared.public.element_spec
        return replace(resolved.resolve_random_run(self.ranks, context, model, task, form), recipe=recipe)


def run_trial(
    ranks: Sequence[RankPlan], context: RunContext, num_steps: int, cut: str = ""
) -> tuple[TrialResult, float]:
    """Return the result of `num_steps` steps in a separate run, and the seconds of its start."""
    with TuningRun(ranks, context, cut) as run:
        return run.take_steps(ranks, num_steps), run.start_s


def read_trial(events: Sequence[Event], nodes: Sequence[str]) -> TrialResult:
    """Sum up the events of the ranks on `nodes`. Raises RunError unless all took all steps undisturbed."""
    tally, reports = Tally(), defaultdict[int, list[Amounts]](list)
    ended: set[int] = set()
    memory: dict[int, int] = {}
    sum_s, save_s, has_lost_links = 0.0, 0.0, False
    for event in events:
        if isinstance(event, Joined):
            has_lost_links = True
        elif isinstance(event, SumTimed):
            sum_s = event.sum_s
        elif isinstance(event, SaveTimed):
            save_s = event.save_s
        elif isinstance(event, Probed):
            memory[event.rank] = event.peak_memory_bytes
        elif isinstance(event, EpochEnd):
            ended.add(event.rank)
        if report := tally.add(event):
            reports[event.rank].append(report)
    counted = [sum(reports[rank], Amounts()) for rank in range(len(nodes))]
    missing = [
        node
        for rank, (node, amounts) in enumerate(zip(nodes, counted, strict=True))
        if rank not in ended
        or tally.ranks[rank].steps != tally.ranks[0].steps
        or not amounts.steps
        or not (amounts.compute_s > 0 or rank == 0)  # the host may sit out
    ]
    if missing:
        raise _failed(f"ended before {format_node_names(missing)} had done all steps")
    if has_lost_links:
        raise _failed("lost its links")
    host = counted[0]
    return TrialResult(
        step_s=host.step_s / host.steps,
        samples_per_s=host.throughput or 0.0,
        compute_s=tuple(amounts.compute_s / amounts.steps for amounts in counted),
        sum_s=sum_s,
        peak_memory_bytes=tuple(memory.get(rank) for rank in range(len(nodes))),
        error=standard_error([report.step_s / report.steps for report in reports[0] if report.steps]),
        save_s=save_s,
    )


def _failed(reason: str) -> RunError:
    remedy = "check the machines with `csdctl doctor`, then tune again"
    return RunError(f"the trial {reason}", remedy=remedy)
