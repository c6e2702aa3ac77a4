"""`tune`: measures on the machines themselves and writes a plan.

One probe session a machine, all at work at once, as they will be in training: what they share (the
host's cores, the tunnel, the power limit) then shows in the measurement.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

from csdctl.errors import CsdctlError, DeadlineError, InputError, NodeError, RemoteCommandError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.shipping.worker_calls import build_worker_command, worker_error
from csdctl.transport.session import Conversation, Session
from csdctl.tuning.memory import predict_peak_bytes
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.tuning.stannis import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_MARGIN_SCALE,
    DEFAULT_STEP_DIVISOR,
    TunedBatch,
    TuningError,
    check_arguments,
    tune_stannis,
)
from csdctl.worker.contract import ContractError, ProbeRequest, ProbeResult, ProbeSpec, from_json, to_json
from csdctl.workflows.prepare import Prepared, python_of

START_DEADLINE_S = 300.0
PROBE_DEADLINE_S = 600.0
CONFIRM_DURATION_S = 3.0
ALIVE_INTERVAL_S = 10.0
MEMORY_SHARE = 0.9
"""Of a machine's usable memory, what a rank's predicted peak may take."""
TUNING_HELP = "see `csdctl tune --help`: --batch-sizes, -C, -E, --probe-seconds"
OUT_OF_MEMORY_CODE = 137


@dataclass(frozen=True)
class TuneOptions:
    """Algorithm 1's list, C and E, and how long each probe runs at least."""

    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    step_divisor: float = DEFAULT_STEP_DIVISOR
    margin_scale: float = DEFAULT_MARGIN_SCALE
    probe_duration_s: float = 1.0

    def __post_init__(self) -> None:
        try:
            check_arguments(self.batch_sizes, self.step_divisor, self.margin_scale)
        except TuningError as error:
            raise InputError(str(error), remedy=TUNING_HELP) from None
        if not 0 <= self.probe_duration_s < PROBE_DEADLINE_S:
            raise InputError(f"a probe cannot take {self.probe_duration_s} seconds", remedy=TUNING_HELP)


OnProbes = Callable[[Mapping[str, ProbeResult | None]], None]
Say = Callable[[str], None]


def tune(
    job: Job,
    fleet: Fleet,
    facts: Mapping[str, Facts],
    prepared: Prepared,
    sessions: Mapping[str, Session],
    options: TuneOptions,
    say: Say,
    on_probes: OnProbes,
) -> Plan:
    """Run Algorithm 1 over the host and every node; raises InputError, DeadlineError, NodeError."""
    machines = [HOST_NAME, *(node.name for node in fleet.nodes)]
    threads = {name: _threads(name, fleet, facts) for name in machines}
    with ThreadPoolExecutor(len(machines)) as pool, ExitStack() as stack:
        say(f"starting TensorFlow on {len(machines)} machines")
        probers = {
            name: stack.enter_context(
                Prober(
                    sessions[name],
                    _probe_command(name, job, fleet, prepared, threads[name]),
                    facts[name].usable_memory_bytes,
                )
            )
            for name in machines
        }
        list(pool.map(Prober.start, probers.values()))
        rounds = ProbeRounds(probers, pool, on_probes)
        try:
            tuned = tune_stannis(
                machines,
                lambda sizes: rounds.step_times(sizes, options.probe_duration_s),
                batch_sizes=options.batch_sizes,
                step_divisor=options.step_divisor,
                margin_scale=options.margin_scale,
            )
        except TuningError as error:
            raise InputError(str(error), remedy=TUNING_HELP) from None
        # Once more, for longer: what the ranks reach alone is what a run's efficiency is held against.
        say("confirming the chosen batch sizes")
        confirmed = rounds.step_times(
            {name: one.batch_size for name, one in tuned.items()}, CONFIRM_DURATION_S
        )
    ranks = []
    for name, one in tuned.items():
        step_time_s = confirmed[name]
        if step_time_s is None:
            raise NodeError(
                f"batch size {one.batch_size} fitted in memory once and then no longer",
                node=name,
                remedy="look what else uses that machine's memory, or give smaller --batch-sizes",
            )
        ranks.append(_rank_plan(probers[name], one, step_time_s, threads[name]))
    return Plan(
        job=job.name,
        job_fingerprint=job.fingerprint(),
        method="stannis",
        emulated=fleet.emulated,
        method_arguments={
            "batch_sizes": list(options.batch_sizes),
            "C": options.step_divisor,
            "E": options.margin_scale,
        },
        num_probes=rounds.num_probes,
        measuring_s=round(rounds.measuring_s, 2),
        ranks=ranks,
    )


def _probe_command(name: str, job: Job, fleet: Fleet, prepared: Prepared, threads: int) -> list[str]:
    spec = ProbeSpec(
        prepared.model.architecture.path,
        prepared.model.weights.path,
        job.recipe,
        threads,
        replace(prepared.public, class_counts={}, num_skipped={}),  # it goes on a command line
        noise=job.noise if name in prepared.private else None,
    )
    return build_worker_command(
        python_of(fleet, name), prepared.worker.path, ["probe", "--spec", to_json(spec)]
    )


def _rank_plan(prober: "Prober", tuned: TunedBatch, step_time_s: float, threads: int) -> RankPlan:
    return RankPlan(
        node=prober.name,
        batch_size=tuned.batch_size,
        threads=threads,
        step_time_s=round(step_time_s, 6),
        images_per_s=round(tuned.batch_size / step_time_s, 2),
        peak_memory_bytes=prober.peak_bytes(tuned.batch_size),
    )


def equal_plan(
    job: Job, fleet: Fleet, facts: Mapping[str, Facts], nodes: Sequence[str], batch_size: int
) -> Plan:
    """A plan without tuning: one batch size for every rank."""
    return Plan(
        job=job.name,
        job_fingerprint=job.fingerprint(),
        method="equal",
        emulated=fleet.emulated,
        ranks=[
            RankPlan(node=name, batch_size=batch_size, threads=_threads(name, fleet, facts))
            for name in (HOST_NAME, *nodes)
        ],
    )


def _threads(name: str, fleet: Fleet, facts: Mapping[str, Facts]) -> int:
    if name == HOST_NAME and fleet.host.threads:
        return fleet.host.threads
    return facts[name].num_threads if name in facts else 1


class ProbeRounds:
    """Measures on all machines at once, and counts."""

    def __init__(
        self, probers: Mapping[str, "Prober"], pool: ThreadPoolExecutor, on_probes: OnProbes
    ) -> None:
        self._probers = probers
        self._pool = pool
        self._on_probes = on_probes
        self.num_probes = 0
        self.measuring_s = 0.0

    def step_times(self, sizes: Mapping[str, int], duration_s: float) -> dict[str, float | None]:
        """Seconds of one step of each machine at its batch size; None where it does not fit."""
        started = time.monotonic()
        requests = {
            name: self._pool.submit(self._probers[name].measure, size, duration_s)
            for name, size in sizes.items()
        }
        results = {name: request.result() for name, request in requests.items()}
        self.num_probes += len(results)
        self.measuring_s += time.monotonic() - started
        self._on_probes(results)
        return {name: result.step_time_s if result else None for name, result in results.items()}


class Prober:
    """One machine's probe session; starts it anew when a probe dies of memory."""

    def __init__(self, session: Session, command: Sequence[str], usable_bytes: int | None) -> None:
        self.name = session.name
        self._session = session
        self._command = command
        self._usable_bytes = usable_bytes
        self._conversation: Conversation | None = None
        self._peaks: dict[int, int] = {}

    def __enter__(self) -> "Prober":
        return self

    def __exit__(self, *_: object) -> None:
        if self._conversation:
            self._conversation.close()

    def start(self) -> None:
        """Start the worker and wait until it is ready for requests."""
        self._conversation = self._session.converse(self._command)
        try:
            self._read_line(START_DEADLINE_S)
        except EOFError:
            raise self._why_it_ended() from None

    def measure(self, batch_size: int, duration_s: float) -> ProbeResult | None:
        """Measure one batch size; None when it does not fit, as predicted or as found."""
        if self._usable_bytes:
            predicted = predict_peak_bytes(self._peaks, batch_size)
            if predicted and predicted > self._usable_bytes * MEMORY_SHARE:
                return None
        if self._conversation is None:
            self.start()
        assert self._conversation is not None
        try:
            self._conversation.send_line(to_json(ProbeRequest(batch_size, min_duration_s=duration_s)))
            result = from_json(ProbeResult, self._read_line(PROBE_DEADLINE_S))
        except EOFError:
            if self._died_of_memory():
                self._conversation.close()
                self._conversation = None
                return None
            raise self._why_it_ended() from None
        except ContractError as error:
            raise RemoteCommandError(f"unreadable probe result: {error}", node=self._session.name) from None
        # A process's peak never falls: only a size larger than all before tells its own.
        if batch_size > max(self._peaks, default=0):
            self._peaks[batch_size] = result.peak_memory_bytes
        return result

    def _read_line(self, deadline_s: float) -> str:
        """The worker's next line; raises DeadlineError soon when the machine's SSH server hangs."""
        assert self._conversation is not None
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                return self._conversation.read_line(deadline_s=min(ALIVE_INTERVAL_S, deadline_s))
            except DeadlineError:
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"no measurement within {deadline_s:g} s",
                        node=self.name,
                        remedy="look what else that machine does, or leave it out: --exclude",
                    ) from None
            # A server that hangs keeps its connection open; only an answer tells that it lives.
            self._session.run(["true"], deadline_s=ALIVE_INTERVAL_S)

    def peak_bytes(self, batch_size: int) -> int | None:
        """The most memory the worker had held by the time this batch size was measured."""
        return self._peaks.get(batch_size)

    def _died_of_memory(self) -> bool:
        assert self._conversation is not None
        done = self._conversation.wait(deadline_s=10)
        return done.exit_code == OUT_OF_MEMORY_CODE or b"OOM when allocating" in done.stderr

    def _why_it_ended(self) -> CsdctlError:
        assert self._conversation is not None
        return worker_error(self._conversation.wait(deadline_s=10), self._session.name, "measuring")
