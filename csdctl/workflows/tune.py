"""`tune`: measures on the machines themselves and writes a plan.

One probe session a machine, all at work at once, as they will be in training: what they share (the
host's cores, the tunnel, the power limit) then shows in the measurement.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from csdctl.errors import CsdctlError, DeadlineError, InputError, RemoteCommandError
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
    TuningError,
    tune_stannis,
)
from csdctl.worker.contract import ContractError, ProbeRequest, ProbeResult, ProbeSpec, from_json, to_json
from csdctl.workflows.prepare import Prepared, python_of

START_DEADLINE_S = 300.0
PROBE_DEADLINE_S = 600.0
MEMORY_SHARE = 0.9
"""Of a machine's usable memory, what a rank's predicted peak may take."""
OUT_OF_MEMORY_CODES = (137, -9)


@dataclass(frozen=True)
class TuneOptions:
    """Algorithm 1's list, C and E, and how long each probe runs at least."""

    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    step_divisor: float = DEFAULT_STEP_DIVISOR
    margin_scale: float = DEFAULT_MARGIN_SCALE
    probe_duration_s: float = 1.0


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
    """Run Algorithm 1 over the host and every reachable node; raises InputError, DeadlineError, NodeError."""
    machines = [HOST_NAME, *(node.name for node in fleet.nodes if node.name in sessions)]
    threads = {name: _threads(name, fleet, facts) for name in machines}
    with ExitStack() as stack, ThreadPoolExecutor(len(machines)) as pool:
        say(f"starting TensorFlow on {len(machines)} machines")
        probers = {}
        for name in machines:
            spec = ProbeSpec(
                prepared.model.architecture.path,
                prepared.model.weights.path,
                job.recipe,
                threads[name],
                prepared.public.max_label,
            )
            command = build_worker_command(
                python_of(fleet, name), prepared.worker.path, ["probe", "--spec", to_json(spec)]
            )
            usable = facts[name].usable_memory_bytes if name in facts else None
            probers[name] = stack.enter_context(Prober(sessions[name], command, usable))
        list(pool.map(lambda prober: prober.start(), probers.values()))
        started = time.monotonic()
        history: list[Mapping[str, ProbeResult | None]] = []

        def measure(sizes: Mapping[str, int]) -> dict[str, float | None]:
            requests = {
                name: pool.submit(probers[name].measure, size, options.probe_duration_s)
                for name, size in sizes.items()
            }
            results = {name: request.result() for name, request in requests.items()}
            history.append(results)
            on_probes(results)
            return {name: result.step_time_s if result else None for name, result in results.items()}

        try:
            tuned = tune_stannis(
                machines,
                measure,
                batch_sizes=options.batch_sizes,
                step_divisor=options.step_divisor,
                margin_scale=options.margin_scale,
            )
        except TuningError as error:
            raise InputError(str(error), remedy="see `csdctl tune --help`: --batch-sizes, -C, -E") from None
        measuring_s = time.monotonic() - started
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
        num_probes=sum(len(results) for results in history),
        measuring_s=round(measuring_s, 2),
        ranks=[
            RankPlan(
                node=name,
                batch_size=one.batch_size,
                threads=threads[name],
                step_time_s=round(one.step_time_s, 6),
                images_per_s=round(one.images_per_s, 2),
                peak_memory_bytes=probers[name].peak_bytes(one.batch_size),
            )
            for name, one in tuned.items()
        ],
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


class Prober:
    """One machine's probe session; starts it anew when a probe dies of memory."""

    def __init__(self, session: Session, command: Sequence[str], usable_bytes: int | None) -> None:
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
            self._conversation.read_line(deadline_s=START_DEADLINE_S)
        except EOFError:
            raise self._why_it_ended() from None
        except DeadlineError as error:
            error.node = error.node or self._session.name
            raise

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
            result = from_json(ProbeResult, self._conversation.read_line(deadline_s=PROBE_DEADLINE_S))
        except EOFError:
            if self._died_of_memory():
                self._conversation = None
                return None
            raise self._why_it_ended() from None
        except ContractError as error:
            raise RemoteCommandError(f"unreadable probe result: {error}", node=self._session.name) from None
        self._peaks[batch_size] = result.peak_memory_bytes
        return result

    def peak_bytes(self, batch_size: int) -> int | None:
        """The most memory the worker had held by the time this batch size was measured."""
        return self._peaks.get(batch_size)

    def _died_of_memory(self) -> bool:
        assert self._conversation is not None
        done = self._conversation.wait(deadline_s=10)
        return done.exit_code in OUT_OF_MEMORY_CODES or b"OOM when allocating" in done.stderr

    def _why_it_ended(self) -> CsdctlError:
        assert self._conversation is not None
        return worker_error(self._conversation.wait(deadline_s=10), self._session.name, "measuring")
