"""Probe sessions: one worker per machine, which measures batch sizes on request.

All machines compute at the same time, as in training: what they share (the host's cores, the tunnel, the
power limit) then shows in the measurement.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from csdctl.errors import DeadlineError, OutOfMemoryError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.shipping.worker_calls import WorkerProgram, build_worker_command
from csdctl.supervision.rank_processes import AttachRank
from csdctl.transport.program import MAX_PRINTED_LINES, Nothing, Patience, ProgramEndedError
from csdctl.transport.session import Conversation, Deadline, Session
from csdctl.tuning.fleet_model import ProbeOutcome, TrialResult, predict_peak_bytes, rank_memory_bytes
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import CollectiveTimed, Event
from csdctl.worker.protocol.json_codec import RESULT, to_json, to_tagged
from csdctl.worker.protocol.probe import AttachRequest, ProbeRequest, ProbeResult, ProbeSpec
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.preflight.mpi_check import measure_sums
from csdctl.workflows.tune.options import PROBE_DEADLINE_S
from csdctl.workflows.tune.trial import run_trial
from csdctl.workflows.workspace.workspace import Workspace

LOADING, IDLE, SUMMING, MEASURING, MEASURED, TOO_LARGE = (
    "loading",
    "idle",
    "timing sums",
    "measuring",
    "measured",
    "out of memory",
)
"""States of a machine while it is measured."""


class TuneWatch(Protocol):
    """Is told what the machines do; may be called from any thread."""

    def on_machine(self, name: str, doing: str, batch_size: int = ..., samples_per_s: float = ..., /) -> None:
        """Machine `name` does this now: one of the words above."""

    def on_probes(self, results: Mapping[str, ProbeResult | None], /) -> None:
        """A round of probes is over: results by machine."""

    def on_trial(self, num_steps: int, batch_sizes: Mapping[str, int], /) -> None:
        """All machines in `batch_sizes` take `num_steps` steps together."""

    def on_event(self, event: Event, /) -> None:
        """A rank of the trial has reported this."""


START_DEADLINE_S = 300.0
ALIVE_INTERVAL_S = 10.0
OUT_OF_MEMORY_CODE = 137
PATIENCE = Patience(ALIVE_INTERVAL_S, math.inf, math.inf, MAX_PRINTED_LINES)
MAX_MEMORY_BYTES = 1 << 50


def build_probe_command(name: str, job: Job, fleet: Fleet, prepared: Prepared, runtime: Runtime) -> list[str]:
    """Build the command of a probe session on machine `name`."""
    spec = ProbeSpec(
        prepared.model.architecture.path,
        prepared.model.weights.path,
        prepared.recipe,
        runtime,
        prepared.public.element_spec,  # the whole description is too long for a command line
        code=prepared.model.user_code,
        noise=job.noise,
        is_private=name in prepared.private,
    )
    return build_worker_command(
        fleet.python_of(name), prepared.worker.path, ["probe", "--spec", to_json(spec)]
    )


class FleetMeasurer:
    """Measures the machines of a workspace: probes on all at once, sums, trials; a context manager.

    TensorFlow starts on the machines with the first request.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        space: Workspace,
        runtimes: Mapping[str, Runtime],
        watch: TuneWatch,
        say: Say,
    ) -> None:
        """`runtimes` of every machine that trains."""
        self._job, self._prepared, self._space = job, prepared, space
        self._watch, self._say = watch, say
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
        for prober in self.probers.values():
            prober.close()

    def switch(self, runtimes: Mapping[str, Runtime]) -> None:
        """Measure these machines with these settings from the next round on."""
        for name, runtime in runtimes.items():
            if self._runtimes.get(name) != runtime:
                if name in self.probers:
                    self.probers[name].close()
                command = build_probe_command(name, self._job, self._space.fleet, self._prepared, runtime)
                usable_bytes = self._space.facts[name].usable_memory_bytes
                self.probers[name] = Prober(self._space.sessions[name], command, usable_bytes)
                self._runtimes[name] = runtime

    def time_sums(self, sizes: Sequence[tuple[int, int]]) -> list[CollectiveTimed]:
        """Time sums over (number of ranks, bytes of a rank's vector)."""
        space = self._space
        for name in space.fleet.machines:
            self._watch.on_machine(name, SUMMING)
        timed = measure_sums(space.fleet, space.facts, space.sessions, space.project, sizes)
        for name in space.fleet.machines:
            self._watch.on_machine(name, IDLE)
        self.measuring_s += sum(timing.sum_s for timing in timed)
        return timed

    def probe(self, requests: Mapping[str, ProbeRequest]) -> dict[str, ProbeOutcome]:
        """Run one round of probes."""
        outcomes = {}
        for name, result in self.measure(requests).items():
            prober, size = self.probers[name], requests[name].batch_size
            outcomes[name] = ProbeOutcome(
                size,
                result.step_time_s if result else None,
                result.num_steps if result else 0,
                dict(prober.peaks),
                is_oom_kill=result is None and size in prober.oom_sizes,
            )
        return outcomes

    def run_trial(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        """Take steps with all ranks, in the processes that measured where their settings agree.

        Raises OutOfMemoryError for a rank that was killed.
        """
        # A host that does not train has a worker with fewer threads, which the trial starts.
        attach = self.prepare_trial({rank.node: rank.runtime for rank in ranks if rank.batch_size})
        self._say(f"trying the plan: {num_steps} steps of all {len(ranks)} ranks")
        self._watch.on_trial(num_steps, {rank.node: rank.batch_size for rank in ranks})
        try:
            result = run_trial(
                self._job,
                ranks,
                self._prepared,
                self._space,
                num_steps,
                attach,
                on_event=self._watch.on_event,
            )
        except OutOfMemoryError:
            self.end_sessions()  # the other ranks ended with the one that was killed
            raise
        self.measuring_s += result.wall_s
        return result

    def prepare_trial(self, runtimes: Mapping[str, Runtime]) -> dict[str, AttachRank]:
        """Keep one session with these settings per machine, and end all others; return how to attach each."""
        self.switch(runtimes)
        for name in self.probers.keys() - runtimes.keys():
            self.probers[name].close()
        self._start(runtimes)
        return {name: self.probers[name].attach for name in runtimes}

    def measure(self, requests: Mapping[str, ProbeRequest]) -> dict[str, ProbeResult | None]:
        """Measure one round, all machines at once; None where the batch did not fit in memory."""
        self._start(self.probers)
        started = time.monotonic()
        found = self._pool.map(self._measure, requests, requests.values())
        results = dict(zip(requests, found, strict=True))
        self.measuring_s += time.monotonic() - started
        self.num_probes += len(results)
        self._watch.on_probes(results)
        return results

    def _measure(self, name: str, request: ProbeRequest) -> ProbeResult | None:
        self._watch.on_machine(name, MEASURING, request.batch_size)
        result = self.probers[name].measure(request)
        if result:
            self._watch.on_machine(name, MEASURED, request.batch_size, result.samples_per_s)
        else:
            self._watch.on_machine(name, TOO_LARGE, request.batch_size)
        return result

    def _start(self, names: Iterable[str]) -> None:
        waiting = [prober for name in names if not (prober := self.probers[name]).is_running]
        if not waiting:
            return
        self._say(f"starting TensorFlow on {len(waiting)} machine" + ("s" if len(waiting) > 1 else ""))
        started = time.monotonic()
        list(self._pool.map(self._start_one, waiting))
        self.start_s = max(self.start_s, time.monotonic() - started)

    def _start_one(self, prober: "Prober") -> None:
        self._watch.on_machine(prober.name, LOADING)
        prober.start()
        self._watch.on_machine(prober.name, IDLE)


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
        self.oom_sizes: set[int] = set()
        """Batch sizes at which the worker was killed for memory."""

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

    def measure(self, request: ProbeRequest) -> ProbeResult | None:
        """Measure one batch size; None when it is predicted or found not to fit in memory."""
        size = request.batch_size
        if self._memory_bytes and size > max(self.peaks, default=0):
            predicted = predict_peak_bytes(self.peaks, size)
            if predicted and predicted > self._memory_bytes:
                return None
        if self._program is None:
            self.start()
        assert self._program is not None
        try:
            self._program.send(to_tagged("request", request))
            result: ProbeResult = self._read({RESULT: ProbeResult}, PROBE_DEADLINE_S)
        except ProgramEndedError as ended:
            if ended.done.exit_code == OUT_OF_MEMORY_CODE or b"OOM when allocating" in ended.done.stderr:
                self.oom_sizes.add(size)
                self.close()
                return None
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
        return result

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
