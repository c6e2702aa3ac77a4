"""What is measured on the machines: probes of batch sizes, and trials of plans.

One run measures a fleet: its ranks load the model once, and measure what they are told. In a probe, each rank
takes steps alone, all at the same time: what machines share in training (the host's cores, the tunnel, the
power limit) then shows in the measurement. In a trial, the ranks take a few steps together.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from csdctl.errors import CsdctlError, NodeError, OutOfMemoryError, RunError
from csdctl.fleet.names import format_node_names
from csdctl.perfmodel.spread import standard_error
from csdctl.reporting.numbers import format_count, format_rate, format_seconds
from csdctl.reporting.tally import Amounts, Tally
from csdctl.supervision.rank_processes import CHECK_WORKER
from csdctl.supervision.run_setup import Patience
from csdctl.transport.program import ProgramEndedError, within
from csdctl.transport.session import OUT_OF_MEMORY_CODE
from csdctl.tuning.fleet_model import ProbeOutcome, TrialResult, predict_peak_bytes, rank_memory_bytes
from csdctl.tuning.measurements import describe_runtime
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import EpochEnd, Event, Joined, Probed, SumTimed
from csdctl.worker.protocol.orders import Order, Probe, Stop, TakeSteps, TrialRank
from csdctl.worker.protocol.probe import ProbeRequest, ProbeResult, ProbeSpec
from csdctl.worker.protocol.run_spec import ELEMENT_SPEC, TRIAL, TRIAL_SPLIT, RankSpec, Runtime, TaskSpec
from csdctl.workflows.preflight.links import measure_sums
from csdctl.workflows.train.plan import default_runtime
from csdctl.workflows.train.request import TrainOptions
from csdctl.workflows.train.run import run_ranks
from csdctl.workflows.train.spec import (
    ResolvedRun,
    RunContext,
    RunData,
    RunModel,
    build_spec,
    place_ranks,
    with_servers,
)
from csdctl.workflows.train.strategies import cut_model
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import call_machine

SKIPPING_FROM = 10
"""In a trial of at least this many steps, those before a rank's first progress event do not count: the first
step is slow. A trial of fewer has long steps, without a slow first one."""
PROBE_DEADLINE_S = 600.0
"""The longest time of a probe."""
OPTIONS = TrainOptions(
    deadlines=Patience(silence_s=2 * PROBE_DEADLINE_S, poll_s=0.05, max_restarts=0), is_balanced=False
)


class TuningRun:
    """Ranks that measure what they are told. A context manager, which ends them.

    Calls raise what `train` raises for a run that fails: OutOfMemoryError for a rank that was killed, …
    """

    def __init__(self, ranks: Sequence[RankPlan], context: RunContext, cut: str = "") -> None:
        """Start the ranks, which load batches of the sizes in `ranks`.

        `cut`: the last layer on the nodes of a model that is cut in two. '' for a whole one.
        """
        self.ranks, self._context = ranks, context
        self._directory = context.space.project.new_scratch()
        self._resolved = self._resolve(cut)
        step_file = str(context.space.project.step_file(self._directory))
        # As in a training run, rank 0 saves the state of every step, which takes time.
        self.spec = build_spec(self._resolved, self._directory, OPTIONS, step_file=step_file)
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
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
        """Seconds until all ranks were linked."""

    def __enter__(self) -> "TuningRun":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._is_aborted.set()
        else:
            self._orders.put(Stop())
        self._thread.join()

    def probe(self, requests: Mapping[str, ProbeRequest]) -> dict[str, Probed]:
        """Measure steps of these machines, all at the same time. Return what each has measured."""
        nodes = enumerate(rank.node for rank in self.ranks)
        by_rank = {str(rank): requests[node] for rank, node in nodes if node in requests}
        self._orders.put(Probe(by_rank))
        events = self._await(Probed, [int(rank) for rank in by_rank])
        probed = {event.node: event for event in events if isinstance(event, Probed)}
        for node, result in probed.items():
            expected = requests[node].batch_size if node in requests else "nothing"
            if result.batch_size != expected or (result.step_time_s or 0.0) > PROBE_DEADLINE_S:
                received = f"{result.step_time_s} s for {result.batch_size} samples"
                raise NodeError(f"measured {received}, expected {expected}", node=node, remedy=CHECK_WORKER)
        return probed

    def take_steps(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        """Take steps with all ranks, whose batch sizes are those of `ranks`, on the same nodes."""
        placed = place_ranks(ranks, self._context.prepared, self._context.job)
        sizes = []
        for rank, shard in zip(ranks, placed, strict=True):
            num_samples = rank.batch_size * num_steps
            # Matters only with noise, when each private sample has a gradient of its own.
            num_private = num_samples * shard.num_private // max(1, shard.num_samples)
            num_public = num_samples - num_private
            sizes.append(TrialRank(rank.batch_size, rank.micro_batch_size, num_private, num_public))
        self._orders.put(TakeSteps(tuple(sizes)))
        return read_trial(self._await(Probed, range(len(ranks))), [rank.node for rank in ranks])

    def _await(self, kind: type[Event], ranks: Sequence[int]) -> list[Event]:
        """Return all events until each of `ranks` has sent one of this kind, the last from a rank."""
        self.events = events = list[Event]()
        waiting = {*ranks}
        while waiting:
            event = self._events.get()
            if isinstance(event, BaseException):
                self._events.put(event)  # for whoever asks next
                raise event
            events.append(event)
            if isinstance(event, kind):
                waiting.discard(event.rank)
        return events

    def _take(self, event: object) -> None:
        if isinstance(event, Event):
            self._events.put(event)

    def _supervise(self) -> None:
        options = replace(OPTIONS, min_nodes=len(self.ranks) - 1)
        events, next_order = EventStream((self._take,)), self._next_order
        try:
            run_ranks(self._resolved, self.spec, self._directory, options, events, next_order=next_order)
            shutil.rmtree(self._directory.path, ignore_errors=True)
            self._events.put(RunError("the ranks have ended before they had measured what was asked for"))
        except BaseException as error:  # raised again by the thread that waits for events
            self._events.put(error)
        finally:
            Path(self.spec.step_file).unlink(missing_ok=True)

    def _resolve(self, cut: str) -> ResolvedRun:
        """Return a run of random samples, in which nothing is learned, saved or balanced."""
        context, prepared = self._context, self._context.prepared
        ranks = [
            RankSpec(
                number,
                rank.node,
                rank.batch_size,
                rank.runtime,
                None,
                None,
                num_private=int(rank.node in prepared.private),
                num_public=0,
                max_batch_size=rank.max_batch_size,
                micro_batch_size=rank.micro_batch_size,
            )
            for number, rank in enumerate(self.ranks)
        ]
        model = prepared.model
        return ResolvedRun(
            context,
            RunData(with_servers(ranks, context.space.fleet)),
            cut_model(context, cut) if cut else RunModel(model, model),
            task=TaskSpec(
                TRIAL_SPLIT if cut else TRIAL, {ELEMENT_SPEC: asdict(prepared.public.element_spec)}
            ),
            # Random labels teach nothing: a learning rate of 0 keeps the weights, and keeps them finite.
            recipe=replace(
                prepared.recipe,
                epochs=1,
                learning_rate=0.0,
                schedule="",
                early_stopping=None,
                reduce_on_plateau=None,
            ),
        )

    def _next_order(self) -> Order | None:
        if self._is_aborted.is_set():
            raise KeyboardInterrupt
        with suppress(queue.Empty):
            return self._orders.get_nowait()
        return None


def run_trial(
    ranks: Sequence[RankPlan], context: RunContext, num_steps: int, cut: str = ""
) -> tuple[TrialResult, float]:
    """Return the result of `num_steps` steps in a run of their own, and the seconds of its start."""
    with TuningRun(ranks, context, cut) as run:
        return run.take_steps(ranks, num_steps), run.start_s


def read_trial(events: Sequence[Event], nodes: Sequence[str]) -> TrialResult:
    """Sum up the events of the ranks on `nodes`. Raises RunError unless all took all steps undisturbed."""
    joined = [event for event in events if isinstance(event, Joined)]
    timed = [event.sum_s for event in events if isinstance(event, SumTimed)]
    ended = {event.rank: event for event in events if isinstance(event, EpochEnd)}
    memory = {event.rank: event.peak_memory_bytes for event in events if isinstance(event, Probed)}
    tally, reports = Tally(), defaultdict[int, list[Amounts]](list)
    for event in events:
        if report := tally.add(event):
            reports[event.rank].append(report)
    counted = [sum(_later(reports[rank]), Amounts()) for rank in range(len(nodes))]
    missing = [
        node
        for rank, (node, done) in enumerate(zip(nodes, counted, strict=True))
        if rank not in ended
        or tally.ranks[rank].steps != tally.ranks[0].steps
        or not done.steps
        or not (done.compute_s > 0 or rank == 0)  # the host may sit out
    ]
    if missing or joined:
        what = (
            f"ended before {format_node_names(missing)} had done all steps" if missing else "lost its links"
        )
        raise RunError(f"the trial {what}", remedy="check the machines with `csdctl doctor`, then tune again")
    host = counted[0]
    return TrialResult(
        num_steps=host.steps,
        step_s=host.step_s / host.steps,
        samples_per_s=host.throughput or 0.0,
        compute_s=tuple(done.compute_s / done.steps for done in counted),
        wall_s=ended[0].wall_s,
        sum_s=timed[-1] if timed else 0.0,
        peak_memory_bytes=tuple(memory.get(rank) for rank in range(len(nodes))),
        error=standard_error([one.step_s / one.steps for one in _later(reports[0]) if one.steps]),
    )


def _later(reports: Sequence[Amounts]) -> Sequence[Amounts]:
    """Return the reports of a rank, without the first one of many steps."""
    num_steps = sum(report.steps for report in reports)
    return reports[num_steps >= SKIPPING_FROM and reports[0].steps < num_steps :]


class FleetMeasurer:
    """Measures the machines of a workspace: sums, probes on all at once, trials. A context manager.

    One run of all machines serves probes and trials. It starts with the first request, and again where other
    settings or other machines are asked for.
    """

    def __init__(self, context: RunContext, runtimes: Mapping[str, Runtime]) -> None:
        """`runtimes` of every machine that trains."""
        self._context, self._space, self._say = context, context.space, context.events.say
        self._names = list(self._space.fleet.machines)
        of_all = {name: default_runtime(name, self._space.fleet, self._space.facts) for name in self._names}
        self._runtimes = of_all | {**runtimes}
        self._run: TuningRun | None = None
        self._pool = ThreadPoolExecutor(len(self._names))
        self.peaks: dict[str, dict[int, int]] = {name: {} for name in runtimes}
        """Peak memory of each machine's process in bytes, by batch size, for sizes larger than all before."""
        self.num_probes = 0
        """Probes so far, on all machines."""
        self.measuring_s = 0.0
        """Seconds spent on probes, sums and trials so far."""
        self.start_s = 0.0
        """The longest time in which the ranks have started, with their links."""

    def __enter__(self) -> "FleetMeasurer":
        return self

    def __exit__(self, *error: Any) -> None:
        self.end_run(*error)
        self._pool.shutdown(wait=False)  # its processes end with the sessions

    def end_run(self, *error: Any) -> None:
        """End the ranks. The next request starts them again."""
        run, self._run = self._run, None
        if run:
            run.__exit__(*error or (None,))

    def switch(self, runtimes: Mapping[str, Runtime]) -> None:
        """Measure these machines with these settings from now on."""
        for name, runtime in runtimes.items():
            if self._runtimes[name] != runtime:
                self._runtimes[name], self.peaks[name] = runtime, {}

    def time_sums(self, sum_bytes: Sequence[int], sum_ranks: Sequence[int]) -> list[SumTimed]:
        """Time sums of vectors of each size, over each number of ranks and over all."""
        timed = measure_sums(self._space, sum_bytes, sum_ranks)
        self.measuring_s += sum(timing.sum_s for timing in timed)
        return timed

    def run_trial(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        """Take steps with the ranks of a plan. Raises OutOfMemoryError for a rank that was killed."""
        self.switch({rank.node: rank.runtime for rank in ranks if rank.batch_size})
        run = self._start([rank.node for rank in ranks])
        self._say(f"trying the plan: {num_steps} steps of all {len(ranks)} ranks")
        try:
            result = run.take_steps(ranks, num_steps)
        except CsdctlError:
            self.end_run()
            raise
        self.measuring_s += result.wall_s
        return result

    def measure(self, requests: Mapping[str, tuple[Runtime, ProbeRequest]]) -> dict[str, ProbeOutcome]:
        """Measure one round, all machines at once. Those with other settings in a process of their own."""
        run = self._start(self._names)
        started = time.monotonic()
        others = {name: probe for name, probe in requests.items() if probe[0] != self._runtimes[name]}
        own = {name: request for name, (_, request) in requests.items() if name not in others}
        outcomes = {
            name: ProbeOutcome(request.batch_size, None, peaks=dict(self.peaks[name]))
            for name, request in own.items()
            if not self._fits(name, request.batch_size)
        }
        results = {name: self._pool.submit(self._measure_apart, run, name, *others[name]) for name in others}
        while left := {name: own[name] for name in own.keys() - outcomes.keys()}:
            try:
                outcomes |= {name: self._note(probed) for name, probed in run.probe(left).items()}
            except OutOfMemoryError as error:
                self.end_run()
                if error.node not in requests:
                    raise
                done = [event for event in run.events if isinstance(event, Probed)]
                outcomes |= {event.node: self._note(event) for event in done if event.node in left}
                if error.node in left:  # otherwise, the process beside the rank needed the memory
                    size, peaks = left[error.node].batch_size, dict(self.peaks[error.node])
                    outcomes[error.node] = ProbeOutcome(size, None, peaks=peaks, is_oom_kill=True)
                run = self._start(self._names)
        outcomes |= {name: result.result() for name, result in results.items()}
        self.measuring_s += time.monotonic() - started
        self.num_probes += len(outcomes)
        outcomes = {name: outcomes[name] for name in requests}
        self._say(describe_probes(outcomes))
        return outcomes

    def _fits(self, name: str, size: int, copies: int = 1) -> bool:
        """Return whether a batch may fit into a machine's memory. `copies`: processes that hold the model."""
        usable_bytes = rank_memory_bytes(self._space.facts[name].usable_memory_bytes)
        peaks = self.peaks[name]
        if not usable_bytes or (size <= max(peaks, default=0) and copies == 1):
            return True
        predicted = predict_peak_bytes(peaks, size) or (copies - 1) * max(peaks.values(), default=0)
        return not predicted or predicted * copies <= usable_bytes

    def _note(self, probed: Probed) -> ProbeOutcome:
        """Return the outcome of a probe, and note the memory that it took."""
        size, peaks = probed.batch_size, self.peaks[probed.node]
        if probed.step_time_s is None:
            return ProbeOutcome(size, None, peaks=dict(peaks), is_oom_kill=True)
        # The peak of a process never falls: only a size larger than all before shows its own.
        if size > max(peaks, default=0):
            peaks[size] = probed.peak_memory_bytes
        return ProbeOutcome(size, probed.step_time_s, probed.num_steps, dict(peaks))

    def _measure_apart(
        self, run: TuningRun, name: str, runtime: Runtime, request: ProbeRequest
    ) -> ProbeOutcome:
        size = request.batch_size
        if not self._fits(name, size, copies=2):  # the rank on that machine stays in memory
            return ProbeOutcome(size, None)
        ranks = [replace(rank, runtime=runtime) for rank in run.spec.ranks]  # of which it is one
        number = next(rank.rank for rank in ranks if rank.node == name)
        spec = ProbeSpec(replace(run.spec, ranks=tuple(ranks), step_file=""), number, request)
        call = self._space, name, self._context.prepared.worker, "probe", spec, ProbeResult
        doing, patience = f"measuring with {describe_runtime(runtime)}", within(PROBE_DEADLINE_S)
        try:
            result = call_machine(*call, doing=doing, patience=patience)
        except ProgramEndedError as error:
            if error.done.exit_code != OUT_OF_MEMORY_CODE:
                raise
            return ProbeOutcome(size, None)
        return ProbeOutcome(size, result.step_time_s, result.num_steps, {size: result.peak_memory_bytes})

    def _start(self, names: Sequence[str]) -> TuningRun:
        """Return a run of these machines with the current settings."""
        ranks = [
            RankPlan(node=name, batch_size=int(name in self.peaks), **asdict(self._runtimes[name]))
            for name in names
        ]
        if self._run and self._run.ranks != ranks:
            self.end_run()
        if not self._run:
            self._say(f"starting TensorFlow on {format_count(names, 'machine')}")
            self._run = TuningRun(ranks, self._context)
            self.start_s = max(self.start_s, self._run.start_s)
        return self._run


def describe_probes(outcomes: Mapping[str, ProbeOutcome]) -> str:
    """Return one line for one round of probes on all machines."""
    shown = [
        f"{name} {outcome.batch_size}: {format_seconds(outcome.step_time_s)}, "
        f"{format_rate(outcome.samples_per_s)}/s"
        if outcome.step_time_s
        else f"{name}: does not fit in memory"
        for name, outcome in outcomes.items()
    ]
    return "  " + "  |  ".join(shown)
