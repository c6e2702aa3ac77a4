"""The rounds of tuning by the fit method: measure all machines, learn, and try the best plan.

It takes few probes of each machine class, the cost of a sum, then a trial of the best plan. Each round
measures, stores, and continues with an updated model (csdctl/tuning/fleet_model.py). A second tuning starts
from the stored measurements: it needs no probe, and one trial confirms its plan.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from csdctl.errors import CsdctlError, OutOfMemoryError
from csdctl.reporting.numbers import format_count, format_rate, format_seconds
from csdctl.tuning import fleet_model, plan_choice
from csdctl.tuning.fleet_model import FleetModel, TrialResult, TriedPlan
from csdctl.tuning.measurements import ProbeOutcome
from csdctl.tuning.plan import RankPlan
from csdctl.tuning.plan_choice import TunedFleet, choose_plan
from csdctl.tuning.search import BestPlan, Limits
from csdctl.worker.protocol.events import Probed, SumTimed
from csdctl.worker.protocol.orders import ProbeRequest
from csdctl.workflows.preflight.links import measure_sums
from csdctl.workflows.train.plan import default_runtime
from csdctl.workflows.train.resolved import RunContext
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements
from csdctl.workflows.tune.tuning_run import TuningRun

SUM_BYTES = (1 << 16, 1 << 20, 1 << 23)
"""Sizes of the vectors whose sums are timed, besides the model's own, which is the largest."""
FIRST_TRIAL_S, TRIAL_S = 2.0, 3.0
"""Predicted duration of a trial. The first one after probes, which may lead to a second, is shorter."""
MIN_STEPS, MAX_STEPS = 2, 1000
BALANCING_S, MIN_BALANCING_STEPS = 4.0, 20
"""Predicted time in which batch sizes are balanced before a trial, and the steps that this takes at least."""
MAX_TRIALS = 2
"""Trials of plans that the model calls the best."""
MAX_OOM_RETRIES = 3
"""Trials in which a rank runs out of memory before tuning fails."""
MIN_GAIN_FOR_TRIAL = 0.03
"""A trial may lead to another plan. It is tried too when it is better by more than this share."""


class FleetMeasurer:
    """Measures the machines of a workspace: sums, probes on all at once, trials. A context manager.

    One run of all machines serves probes and trials. It starts with the first request, and again where other
    machines are asked for.
    """

    def __init__(self, context: RunContext, *, is_host_training: bool = True) -> None:
        self._context, self._space, self._say = context, context.space, context.events.say
        self._run: TuningRun | None = None
        training = self._space.fleet.machines if is_host_training else self._space.fleet.machines[1:]
        self.peaks: dict[str, dict[int, int]] = {name: {} for name in training}
        """Peak memory of a rank in bytes, by machine that trains and batch size larger than all before."""
        self.num_probes, self.measuring_s = 0, 0.0
        """Probes so far, and the seconds that they, sums and trials have taken."""
        self.start_s = 0.0
        """The longest time in which the ranks have started, with their links."""

    def __enter__(self) -> "FleetMeasurer":
        return self

    def __exit__(self, *error: Any) -> None:
        """End the ranks. The next request starts them again."""
        run, self._run = self._run, None
        if run:
            run.__exit__(*error or (None,))

    def time_sums(self, sum_bytes: Sequence[int], sum_ranks: Sequence[int]) -> list[SumTimed]:
        """Time sums of vectors of each size, over each number of ranks and over all."""
        sums = measure_sums(self._space, sum_bytes, sum_ranks)
        self.measuring_s += sum(timed.sum_s for timed in sums)
        return sums

    def measure(self, requests: Mapping[str, ProbeRequest]) -> dict[str, ProbeOutcome]:
        """Measure one round, all machines at once."""
        run = self._start(self._space.fleet.machines)
        started = time.monotonic()
        outcomes = {
            name: ProbeOutcome(request.batch_size, None)
            for name, request in requests.items()
            if not self._fits(name, request.batch_size)
        }
        while pending := {name: requests[name] for name in requests.keys() - outcomes.keys()}:
            try:
                outcomes |= {probed.node: self._note(probed) for probed in run.probe(pending)}
            except OutOfMemoryError as error:
                self.__exit__()
                if error.node not in pending:
                    raise
                probed_before = [probed for probed in run.probed if probed.node in pending]
                outcomes |= {probed.node: self._note(probed) for probed in probed_before}
                size = pending[error.node].batch_size
                outcomes[error.node] = ProbeOutcome(size, None, is_oom_kill=True)
                run = self._start(self._space.fleet.machines)
        self.measuring_s += time.monotonic() - started
        self.num_probes += len(outcomes)
        outcomes = {name: outcomes[name] for name in requests}
        self._say(describe_probes(outcomes))
        return outcomes

    def run_trial(self, ranks: Sequence[RankPlan], num_steps: int) -> TrialResult:
        """Take steps with the ranks of a plan. Raises OutOfMemoryError for a rank that was killed."""
        with self._running(ranks, f"trying the plan: {num_steps} steps") as run:
            began = time.monotonic()
            result = run.take_steps(ranks, num_steps)
        self.measuring_s += time.monotonic() - began
        return result

    def balance(self, ranks: Sequence[RankPlan], num_steps: int) -> list[int]:
        """Return the ranks' batch sizes after steps in which they are balanced. Raises as `run_trial`."""
        with self._running(ranks, f"balancing the plan: {num_steps} steps") as run:
            began = time.monotonic()
            sizes = run.balance(ranks, num_steps)
        self.measuring_s += time.monotonic() - began
        return sizes

    @contextmanager
    def _running(self, ranks: Sequence[RankPlan], doing: str) -> Iterator[TuningRun]:
        """Give the run of the ranks of a plan, and end it after an error."""
        run = self._start([rank.node for rank in ranks])
        self._say(f"{doing} of all {len(ranks)} ranks")
        try:
            yield run
        except CsdctlError:
            self.__exit__()
            raise

    def _start(self, names: Sequence[str]) -> TuningRun:
        fleet, facts = self._space.fleet, self._space.facts
        ranks = [
            RankPlan.with_runtime(
                default_runtime(name, fleet, facts), node=name, batch_size=int(name in self.peaks)
            )
            for name in names
        ]
        if self._run and self._run.ranks != ranks:
            self.__exit__()
        if not self._run:
            self._say(f"starting TensorFlow on {format_count(names, 'machine')}")
            self._run = TuningRun(ranks, self._context)
            self.start_s = max(self.start_s, self._run.start_s)
        return self._run

    def _fits(self, name: str, size: int) -> bool:
        usable_bytes = fleet_model.rank_memory_bytes(self._space.facts[name].usable_memory_bytes)
        peaks = self.peaks[name]
        if not usable_bytes or size <= max(peaks, default=0):
            return True
        return (fleet_model.predict_peak_bytes(peaks, size) or 0) <= usable_bytes

    def _note(self, probed: Probed) -> ProbeOutcome:
        size, peaks = probed.batch_size, self.peaks[probed.node]
        if probed.step_time_s is None:
            return ProbeOutcome(size, None, is_oom_kill=True)
        # The peak of a process never falls: only a size larger than all before shows its own.
        if size > max(peaks, default=0):
            peaks[size] = probed.peak_memory_bytes
        return ProbeOutcome(size, probed.step_time_s, peaks.get(size, 0))


def describe_probes(outcomes: Mapping[str, ProbeOutcome]) -> str:
    """Return one line for one round of probes on all machines."""
    parts = [
        f"{name} {outcome.batch_size}: {format_seconds(outcome.step_time_s)}, "
        f"{format_rate(outcome.batch_size / outcome.step_time_s)}/s"
        if outcome.step_time_s
        else f"{name}: does not fit in memory"
        for name, outcome in outcomes.items()
    ]
    return "  " + "  |  ".join(parts)


@dataclass(frozen=True)
class FitTuner:
    """The rounds of a tuning run: each takes a model of the fleet, and returns the updated model."""

    context: RunContext
    measurer: FleetMeasurer
    measurements: FleetMeasurements
    limits: Limits
    probe_duration_s: float = 1.0
    noise_scale: float | None = None
    """Gradient noise scale in samples, to choose the global batch size by goodput. None: by throughput."""

    def tune(self, model: FleetModel) -> TunedFleet:
        """Measure until the best plan was tried. Raises TuningError, and what probes and trials raise."""
        model = self._measure_steps(self._measure_sums(model))
        if factor := self.measurements.recall_overhead(model):
            model = replace(model, overhead_factor=factor)
        limits = self.limits
        if self.noise_scale is not None:
            reference_batch = self.context.job.recipe.reference_batch
            limits = plan_choice.limit_for_goodput(model, limits, self.noise_scale, reference_batch)
            self._say(
                f"gradient noise scale {self.noise_scale:,.0f} samples: "
                f"a global batch of {limits.largest_global_batch} reaches a loss soonest"
            )
        return self._confirm(model, limits)

    def _say(self, line: str) -> None:
        self.context.events.say(line)

    def _measure_sums(self, model: FleetModel) -> FleetModel:
        num_ranks = len(model.machines) + (not model.is_host_training)
        is_timed = any(
            timed.num_ranks == num_ranks and timed.num_bytes >= model.vector_bytes
            for timed in self.measurements.collectives()
        )
        if not is_timed:
            self._say(f"timing sums over {num_ranks} ranks")
            smaller = [size for size in SUM_BYTES if size < model.vector_bytes]
            self.measurements.store_sums(self.measurer.time_sums([*smaller, model.vector_bytes], [2]))
        model = replace(model, collective_cost=fleet_model.fit_collective(self.measurements.collectives()))
        self._say(
            f"a sum of the model's {model.vector_bytes / 1e6:.1f} MB over {num_ranks} ranks takes "
            f"{model.sum_s(num_ranks) * 1000:.1f} ms"
        )
        return model

    def _measure_steps(self, model: FleetModel) -> FleetModel:
        """Probe until the step time of every class is known where it matters."""
        # A new size costs one step to allocate memory and choose kernels. The next one shows its time.
        once = ProbeRequest(1, min_steps=1, min_duration_s=self.probe_duration_s, warm_up_steps=1)
        probed: dict[str, int] = {}
        while sizes := plan_choice.next_probes(model, self.limits):
            probed |= sizes
            # An emulated fleet's host is slower while nodes compute, as in training.
            measured = probed if self.measurements.fleet.emulated else sizes
            outcomes = self.measurer.measure(
                {name: replace(once, batch_size=measured[name]) for name in measured}
            )
            model = self.measurements.learn_probes(model, outcomes)
        return model

    def _confirm(self, model: FleetModel, limits: Limits) -> TunedFleet:
        """Try the best plan, and another plan when the trial predicts a gain. Return the better one."""
        tried: list[TriedPlan] = []
        num_oom = 0
        while True:
            best = choose_plan(model, limits)
            may_follow = self.measurer.num_probes and not tried
            try:
                model, result = self._try(model, best, FIRST_TRIAL_S if may_follow else TRIAL_S)
            except OutOfMemoryError as error:
                num_oom += 1
                if num_oom > MAX_OOM_RETRIES or error.node not in best.batch_sizes:
                    raise
                model = self._limit_memory(model, error.node, best.batch_sizes[error.node])
                continue
            tried.append(result)
            rate = choose_plan(model, limits).prediction.samples_per_s
            gain = rate / plan_choice.predict_plan(model, result.best.batch_sizes).samples_per_s - 1
            is_last = not self.measurer.num_probes or len(tried) == MAX_TRIALS
            if is_last or gain < MIN_GAIN_FOR_TRIAL:
                best_tried = max(tried, key=lambda tried: tried.result.samples_per_s)
                return TunedFleet(limits, model, best_tried)

    def _try(self, model: FleetModel, best: BestPlan, duration_s: float) -> tuple[FleetModel, TriedPlan]:
        """Return the model after a trial of a plan, which is stored, and the trial."""
        best = self._balance(model, best)
        ranks = plan_choice.plan_ranks(model, best)
        num_steps = min(MAX_STEPS, max(MIN_STEPS, round(duration_s / best.prediction.step_s)))
        tried = TriedPlan(best, ranks, self.measurer.run_trial(ranks, num_steps))
        return self.measurements.learn_trial(model, tried), tried

    def _balance(self, model: FleetModel, best: BestPlan) -> BestPlan:
        """Return the plan with batch sizes balanced as in training, if its steps are short enough to try."""
        num_steps = min(MAX_STEPS, round(BALANCING_S / best.prediction.step_s))
        if num_steps < MIN_BALANCING_STEPS or len(best.batch_sizes) < 2:
            return best
        ranks = plan_choice.plan_ranks(model, best)
        try:
            sizes = self.measurer.balance(ranks, num_steps)
        except OutOfMemoryError:  # with a larger batch than planned
            return best
        by_name = {rank.node: size for rank, size in zip(ranks, sizes, strict=True) if size}
        return plan_choice.with_batch_sizes(model, best, by_name)

    def _limit_memory(self, model: FleetModel, machine: str, batch_size: int) -> FleetModel:
        """Plan smaller micro-batches. Not stored: another process on that machine may be the cause."""
        at_once = model.class_of(machine).limit_at_once(batch_size)
        members = model.class_of(machine).with_out_of_memory(batch_size)
        self._say(
            f"{machine}: {at_once} samples at once did not fit in memory together with the other ranks; "
            f"planning for at most {members.max_at_once}"
        )
        return model.with_class(model.class_name(machine), members)
