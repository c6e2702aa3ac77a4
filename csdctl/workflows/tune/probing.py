"""What is measured on the machines: probes of batch sizes, and trials of plans.

A probe session is one worker per machine, which measures batch sizes on request. All machines compute at the
same time, as in training: what they share (the host's cores, the tunnel, the power limit) then shows in the
measurement.

The speed of single machines does not predict the fleet: ranks wait for the slowest of many noisy steps, and
for the sum. In a trial, the ranks of a plan take a few steps together, with the links, the sums and the
processes of a training run, and with random samples. It reads no data, and keeps no output.
"""

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from csdctl.errors import DeadlineError, OutOfMemoryError, RunError
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.names import format_node_names
from csdctl.perfmodel.spread import standard_error
from csdctl.reporting.numbers import format_count, format_rate, format_seconds
from csdctl.reporting.tally import Amounts, Tally
from csdctl.runs.directory import RunDirectory
from csdctl.shipping.worker_calls import WorkerProgram
from csdctl.supervision.rank_processes import AttachRank
from csdctl.transport.commands import build_worker_command
from csdctl.transport.program import MAX_PRINTED_LINES, Nothing, Patience, ProgramEndedError
from csdctl.transport.session import Conversation, Deadline, Session
from csdctl.tuning.fleet_model import ProbeOutcome, TrialResult, predict_peak_bytes, rank_memory_bytes
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import EpochEnd, Event, Finished, Joined, SumTimed
from csdctl.worker.protocol.json_codec import RESULT, to_json, to_tagged
from csdctl.worker.protocol.probe import AttachRequest, ProbeRequest, ProbeResult, ProbeSpec
from csdctl.worker.protocol.run_spec import ELEMENT_SPEC, TRIAL, TRIAL_SPLIT, RunSpec, Runtime, TaskSpec
from csdctl.workflows.preflight.doctor import measure_sums
from csdctl.workflows.train.run import run_ranks
from csdctl.workflows.train.spec import RunContext, RunInputs, TrainOptions, build_spec, place_ranks
from csdctl.workflows.train.strategies import cut_model

SKIPPING_FROM = 10
"""In a trial of at least this many steps, those before a rank's first progress event do not count: the first
step is slow. A trial of fewer has long steps, without a slow first one."""


def run_trial(
    ranks: Sequence[RankPlan],
    context: RunContext,
    num_steps: int,
    attach: Mapping[str, AttachRank] | None = None,
    cut: str = "",
) -> TrialResult:
    """Take `num_steps` steps; machines in `attach` use a process that is already running.

    `cut`: the last layer on the nodes of a model that is cut in two; '' for a whole one.

    Raises what `train` raises, and KeyboardInterrupt when it is stopped.
    """
    started = time.monotonic()
    run = context.space.project.new_scratch()
    spec = _build_spec(run, ranks, context, num_steps, is_split=bool(cut))
    events: list[Event] = []

    options = TrainOptions(min_nodes=len(ranks) - 1)
    try:
        inputs = RunInputs(run, spec, context.prepared, shards={})
        inputs = cut_model(inputs, context, cut) if cut else inputs
        is_stopped = run_ranks(inputs, context.space, options, lambda *_: None, events.append, attach)
    finally:
        Path(spec.step_file).unlink(missing_ok=True)
    shutil.rmtree(run.path, ignore_errors=True)
    if is_stopped:
        raise KeyboardInterrupt
    result = read_trial(events, [rank.node for rank in ranks])
    steps_s = result.step_s * num_steps
    return replace(result, fixed_s=max(0.0, time.monotonic() - started - steps_s))


def _build_spec(
    run: RunDirectory, ranks: Sequence[RankPlan], context: RunContext, num_steps: int, *, is_split: bool
) -> RunSpec:
    """Return a run of random samples, as many of them private as in training."""
    prepared = context.prepared
    placed = place_ranks(ranks, prepared, context.job)
    spec = build_spec(run, ranks, placed, {}, context)
    specs = []
    for rank, shard in zip(spec.ranks, placed, strict=True):
        num_samples = rank.batch_size * num_steps
        # Matters only with noise, when each private sample has a gradient of its own.
        num_private = num_samples * shard.num_private // max(1, shard.num_samples)
        specs.append(
            replace(
                rank,
                private=None,
                public=None,
                num_private=num_private,
                num_public=num_samples - num_private,
                public_start=0,
                num_repeated=0,
                weight=1.0,
            )
        )
    return replace(
        spec,
        # Random labels teach nothing: a learning rate of 0 keeps the weights, and keeps them finite.
        recipe=replace(
            prepared.recipe,
            epochs=1,
            learning_rate=0.0,
            schedule="",
            early_stopping=None,
            reduce_on_plateau=None,
        ),
        ranks=tuple(specs),
        public=None,
        validation=None,
        # As in a training run, rank 0 saves the state of every step, which takes time.
        step_file=str(context.space.project.step_file(run)),
        num_checkpoints=0,
        is_balanced=False,
        task=TaskSpec(
            TRIAL_SPLIT if is_split else TRIAL, {ELEMENT_SPEC: asdict(prepared.public.element_spec)}
        ),
    )


def read_trial(events: Sequence[Event], nodes: Sequence[str]) -> TrialResult:
    """Sum up the events of the ranks on `nodes`; raises RunError unless all took all steps undisturbed."""
    joined = [event for event in events if isinstance(event, Joined)]
    timed = [event.sum_s for event in events if isinstance(event, SumTimed)]
    ended = {event.rank: event for event in events if isinstance(event, EpochEnd)}
    memory = {event.rank: event.peak_memory_bytes for event in events if isinstance(event, Finished)}
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
    if missing or len(joined) > 1:
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


START_DEADLINE_S, PROBE_DEADLINE_S = 300.0, 600.0
ALIVE_INTERVAL_S = 10.0
OUT_OF_MEMORY_CODE = 137
PATIENCE = Patience(ALIVE_INTERVAL_S, math.inf, math.inf, MAX_PRINTED_LINES)
MAX_MEMORY_BYTES = 1 << 50


def build_probe_command(name: str, context: RunContext, runtime: Runtime) -> list[str]:
    """Build the command of a probe session on machine `name`."""
    prepared, python = context.prepared, context.space.fleet.python_of(name)
    spec = ProbeSpec(
        prepared.model.architecture.path,
        prepared.model.weights.path,
        prepared.recipe,
        runtime,
        prepared.public.element_spec,  # the whole description is too long for a command line
        code=prepared.model.user_code,
        noise=context.job.noise,
        compiled=prepared.model.step,
        is_private=name in prepared.private,
    )
    return build_worker_command(python, prepared.worker.path, ["probe", "--spec", to_json(spec)])


class FleetMeasurer:
    """Measures the machines of a workspace: probes on all at once, sums, trials; a context manager.

    TensorFlow starts on the machines with the first request.
    """

    def __init__(self, context: RunContext, runtimes: Mapping[str, Runtime]) -> None:
        """`runtimes` of every machine that trains."""
        self._context, self._space, self._say = context, context.space, context.observer.say
        self.probers: dict[str, Prober] = {}
        self._runtimes: dict[str, Runtime] = {}
        self.switch(runtimes)
        self._pool = ThreadPoolExecutor(len(self.probers))
        self.num_probes = 0
        """Probes so far, on all machines."""
        self.measuring_s = 0.0
        """Seconds spent on probes, sums and trials so far."""
        self.start_s = 0.0
        """The longest time in which TensorFlow has started on the machines."""

    def __enter__(self) -> "FleetMeasurer":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_sessions()
        self._pool.shutdown()

    def end_sessions(self) -> None:
        """End all sessions; the next request starts them again."""
        list(self._pool.map(Prober.close, self.probers.values()))

    def switch(self, runtimes: Mapping[str, Runtime]) -> None:
        """Measure these machines with these settings from the next round on."""
        for name, runtime in runtimes.items():
            if self._runtimes.get(name) != runtime:
                if name in self.probers:
                    self.probers[name].close()
                command = build_probe_command(name, self._context, runtime)
                usable_bytes = self._space.facts[name].usable_memory_bytes
                self.probers[name] = Prober(self._space.sessions[name], command, usable_bytes)
                self._runtimes[name] = runtime

    def time_sums(self, sum_bytes: Sequence[int], sum_ranks: Sequence[int]) -> list[SumTimed]:
        """Time sums of vectors of each size, over each number of ranks and over all."""
        timed = measure_sums(self._space, sum_bytes, sum_ranks)
        self.measuring_s += sum(timing.sum_s for timing in timed)
        return timed

    def run_trial(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        """Take steps with all ranks, in the processes that measured where their settings agree.

        Raises OutOfMemoryError for a rank that was killed.
        """
        # A host that does not train has a worker with fewer threads, which the trial starts.
        attach = self.prepare_trial({rank.node: rank.runtime for rank in ranks if rank.batch_size})
        self._say(f"trying the plan: {num_steps} steps of all {len(ranks)} ranks")
        try:
            result = run_trial(ranks, self._context, num_steps, attach)
        except OutOfMemoryError:
            self.end_sessions()  # the other ranks ended with the one that was killed
            raise
        self.measuring_s += result.wall_s
        return result

    def prepare_trial(self, runtimes: Mapping[str, Runtime]) -> dict[str, AttachRank]:
        """Keep one session with these settings per machine; return how to attach each.

        The host's ends if it does not train: its rank 0 only sums, and starts a process of its own.
        """
        self.switch(runtimes)
        if HOST_NAME in self.probers.keys() - runtimes.keys():
            self.probers[HOST_NAME].close()
        self._start(runtimes)
        return {name: self.probers[name].attach for name in runtimes}

    def measure(self, requests: Mapping[str, ProbeRequest]) -> dict[str, ProbeOutcome]:
        """Measure one round, all machines at once."""
        self._start(self.probers)
        started = time.monotonic()
        found = self._pool.map(lambda name: self.probers[name].measure(requests[name]), requests)
        results = dict(zip(requests, found, strict=True))
        self.measuring_s += time.monotonic() - started
        self.num_probes += len(results)
        self._say(describe_probes(results))
        return results

    def _start(self, names: Iterable[str]) -> None:
        waiting = [prober for name in names if not (prober := self.probers[name]).is_running]
        if not waiting:
            return
        self._say(f"starting TensorFlow on {format_count(waiting, 'machine')}")
        started = time.monotonic()
        list(self._pool.map(Prober.start, waiting))
        self.start_s = max(self.start_s, time.monotonic() - started)


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


class Prober:
    """One machine's probe session; restarts the worker after it was killed for memory."""

    def __init__(self, session: Session, command: Sequence[str], usable_bytes: int | None) -> None:
        """`command` starts the worker."""
        self.name = session.name
        self._session = session
        self._command = command
        self._memory_bytes = rank_memory_bytes(usable_bytes)
        """Memory that a rank may fill; None: unknown."""
        self._program: WorkerProgram | None = None
        self.peaks: dict[int, int] = {}
        """Peak memory of the worker in bytes, by batch size, for sizes larger than all before."""

    @property
    def is_running(self) -> bool:
        """Whether a worker is running; a killed one is restarted when it is needed."""
        return self._program is not None

    def close(self) -> None:
        """End the worker if it is running."""
        if self._program:
            self._program.close()
            self._program = None

    def start(self) -> None:
        """Start the worker, and wait until it is ready for requests; raises CsdctlError."""
        self._program = WorkerProgram(self._session, self._command, "measuring", PATIENCE)
        self._read({"ready": Nothing}, START_DEADLINE_S)

    def attach(self, spec: str, rank: int) -> Conversation:
        """Make the running worker rank `rank` of the run in file `spec`, until that has finished."""
        assert self._program is not None
        self._program.send(to_tagged("request", AttachRequest(spec, rank)))
        return self._program.conversation

    def measure(self, request: ProbeRequest) -> ProbeOutcome:
        """Measure one batch size, unless it is predicted not to fit in memory."""
        size = request.batch_size
        if self._memory_bytes and size > max(self.peaks, default=0):
            predicted = predict_peak_bytes(self.peaks, size)
            if predicted and predicted > self._memory_bytes:
                return ProbeOutcome(size, None, peaks=dict(self.peaks))
        if self._program is None:
            self.start()
        assert self._program is not None
        try:
            self._program.send(to_tagged("request", request))
            result: ProbeResult = self._read({RESULT: ProbeResult}, PROBE_DEADLINE_S)
        except ProgramEndedError as ended:
            if ended.done.exit_code == OUT_OF_MEMORY_CODE or b"OOM when allocating" in ended.done.stderr:
                self.close()
                return ProbeOutcome(size, None, peaks=dict(self.peaks), is_oom_kill=True)
            raise
        if (
            result.batch_size != size
            or result.step_time_s > PROBE_DEADLINE_S
            or result.peak_memory_bytes > MAX_MEMORY_BYTES
        ):
            problem = f"received {str(result)[:200]} for batch size {size}"
            raise self._program.error(problem)
        # The peak of a process never falls: only a size larger than all before shows its own.
        if size > max(self.peaks, default=0):
            self.peaks[size] = result.peak_memory_bytes
        return ProbeOutcome(size, result.step_time_s, result.num_steps, dict(self.peaks))

    def _read(self, messages: Mapping[str, type], deadline_s: float) -> Any:
        """Return the worker's next answer; raises DeadlineError early when the machine's SSH server hangs."""
        assert self._program is not None
        deadline = Deadline(deadline_s)
        while True:
            try:
                return self._program.read(messages)[1]
            except DeadlineError:
                if deadline.has_passed:
                    raise DeadlineError(
                        f"no measurement within {deadline_s:g} s",
                        node=self.name,
                        remedy="check what else runs on that machine, or leave it out: --exclude",
                    ) from None
            # A hanging server keeps its connection open; only a response shows that it is alive.
            self._session.run(["true"], deadline_s=ALIVE_INTERVAL_S)
