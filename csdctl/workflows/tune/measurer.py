"""The measuring interface of tuning, and its implementation on the machines of an open workspace."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from csdctl.errors import OutOfMemoryError
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.tuning.measurements import RuntimeSettings
from csdctl.tuning.observations import ProbeOutcome, TrialResult
from csdctl.tuning.plan import RankPlan
from csdctl.worker.protocol.events import CollectiveTimed
from csdctl.worker.protocol.probe import ProbeRequest
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.preflight.mpi_check import measure_sums
from csdctl.workflows.tune.probing import ProbeRounds
from csdctl.workflows.tune.trial import run_trial
from csdctl.workflows.tune.watch import IDLE, SUMMING, TuneWatch
from csdctl.workflows.workspace.workspace import Workspace


class Measurer(Protocol):
    """Measures a fleet; every method raises CsdctlError when a machine fails."""

    @property
    def num_probes(self) -> int:
        """Probes so far, on all machines."""

    @property
    def measuring_s(self) -> float:
        """Seconds spent on probes, sums and trials so far."""

    def time_sums(self, sizes: Sequence[tuple[int, int]]) -> list[CollectiveTimed]:
        """Time sums over (number of ranks, bytes of a rank's vector)."""

    def probe(self, requests: Mapping[str, ProbeRequest]) -> dict[str, ProbeOutcome]:
        """Run one round of probes on these machines at the same time; the others keep computing."""

    def share_work(self, machines: Sequence[str]) -> None:
        """Have unprobed machines of a class take the steps of a probed one during rounds."""

    def switch_settings(self, settings: Mapping[str, RuntimeSettings], peaks: Mapping[str, int]) -> None:
        """Probe these machines with other settings from now on; `peaks`: bytes each holds at most."""

    def run_trial(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        """Take steps with all ranks; raises OutOfMemoryError for a rank that was killed."""


class FleetMeasurer:
    """A `Measurer` on the machines of a workspace; a context manager that ends what it starts."""

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        space: Workspace,
        settings: Mapping[str, RuntimeSettings],
        watch: TuneWatch,
        say: Say,
    ) -> None:
        """`settings` of every machine that trains; processes are started when they are first needed."""
        self._job, self._prepared, self._space, self._say = job, prepared, space, say
        self._watch = watch
        self._stack = ExitStack()
        self._rounds = ProbeRounds(job, prepared, space, _runtimes(settings), watch, say)
        self._sums_s = 0.0
        self._trials_s = 0.0

    def __enter__(self) -> "FleetMeasurer":
        self._stack.enter_context(self._rounds)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def num_probes(self) -> int:
        """Probes so far, on all machines."""
        return self._rounds.num_probes

    @property
    def measuring_s(self) -> float:
        """Seconds spent on probes, sums and trials so far."""
        return self._sums_s + self._rounds.measuring_s + self._trials_s

    @property
    def start_s(self) -> float:
        """The longest time in which TensorFlow has started on the machines; 0: it was not started."""
        return self._rounds.start_s

    def time_sums(self, sizes: Sequence[tuple[int, int]]) -> list[CollectiveTimed]:
        """Time sums over (number of ranks, bytes of a rank's vector)."""
        space = self._space
        for name in space.fleet.machines:
            self._watch.on_machine(name, SUMMING)
        timed = measure_sums(space.fleet, space.facts, space.sessions, space.project, sizes)
        for name in space.fleet.machines:
            self._watch.on_machine(name, IDLE)
        self._sums_s += sum(timing.sum_s for timing in timed)
        return timed

    def probe(self, requests: Mapping[str, ProbeRequest]) -> dict[str, ProbeOutcome]:
        """Run one round of probes; machines without a request take short steps meanwhile."""
        results = self._rounds.measure(requests, is_keeping_busy=True)
        outcomes = {}
        for name, result in results.items():
            prober, size = self._rounds.probers[name], requests[name].batch_size
            outcomes[name] = ProbeOutcome(
                size,
                result.step_time_s if result else None,
                result.num_steps if result else 0,
                dict(prober.peaks),
                is_oom_kill=result is None and size in prober.oom_sizes,
            )
        return outcomes

    def share_work(self, machines: Sequence[str]) -> None:
        """Have unprobed machines of a class take the steps of a probed one during rounds."""
        self._rounds.share_work(machines)

    def switch_settings(self, settings: Mapping[str, RuntimeSettings], peaks: Mapping[str, int]) -> None:
        """Probe these machines with other settings from now on; `peaks`: bytes each holds at most."""
        self._rounds.switch(_runtimes(settings), peaks)

    def run_trial(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        """Take steps with all ranks, in the processes that measured where their settings agree."""
        # A host that does not train has a worker with fewer threads, which the trial starts.
        attach = self._rounds.prepare_trial({rank.node: rank.runtime for rank in ranks if rank.batch_size})
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
            self._rounds.end_sessions()  # the other ranks ended with the one that was killed
            raise
        self._trials_s += result.wall_s
        return result


def _runtimes(settings: Mapping[str, RuntimeSettings]) -> dict[str, Runtime]:
    return {
        name: Runtime(setting.threads, setting.inter_op_threads, setting.is_onednn)
        for name, setting in settings.items()
    }
