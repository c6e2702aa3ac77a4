"""The rounds of tuning by the fit method: measure all machines, learn, and try the best plan.

The fit method takes few probes of each machine class, the cost of a sum, then a trial of the best plan. The
model of the fleet is an immutable value (csdctl/tuning/fleet_model.py). Each round measures, stores the
measurements in the measurements file, and continues with the model updated from them. A second tuning run
starts from the file: it needs no probe, and one trial confirms its plan.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from csdctl.errors import CsdctlError, OutOfMemoryError
from csdctl.reporting.numbers import format_count, format_rate, format_seconds
from csdctl.reporting.results import list_forecast_errors
from csdctl.runs.measurements import MeasurementStore
from csdctl.tuning.fleet_model import (
    FleetModel,
    TrialResult,
    TriedPlan,
    fit_collective,
    predict_peak_bytes,
    rank_memory_bytes,
)
from csdctl.tuning.measurements import HALVED_BYTES, ProbeOutcome
from csdctl.tuning.plan import DATA_PARALLEL, Plan, RankPlan
from csdctl.tuning.plan_choice import (
    TunedFleet,
    choose_equal_plan,
    choose_plan,
    confirmed_prediction,
    limit_for_goodput,
    next_probes,
    plan_ranks,
    predict_host_samples_per_s,
    predict_samples_per_s,
)
from csdctl.tuning.search import BestPlan, Limits, default_limits
from csdctl.tuning.stannis import TuningError
from csdctl.worker.protocol.events import Probed, SumTimed
from csdctl.worker.protocol.probe import ProbeRequest
from csdctl.worker.protocol.recipe import BF16
from csdctl.workflows.preflight.links import measure_sums
from csdctl.workflows.train.plan import default_runtime
from csdctl.workflows.train.spec import RunContext
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe
from csdctl.workflows.tune.request import FIT, TuneOptions
from csdctl.workflows.tune.strategy_choice import StrategyChooser
from csdctl.workflows.tune.tuning_run import TuningRun

SUM_BYTES = (1 << 16, 1 << 20, 1 << 23)
"""Sizes of the vectors whose sums are timed, besides the model's own, which is the largest."""
FIRST_TRIAL_S, TRIAL_S = 2.0, 3.0
"""Predicted duration of a trial. The first one after probes, which may lead to a second, is shorter."""
MIN_STEPS, MAX_STEPS = 2, 1000
"""Limits of the number of steps of a trial."""
MAX_TRIALS = 2
"""Trials of plans that the model calls the best."""
MAX_OOM_RETRIES = 3
"""Trials in which a rank runs out of memory before tuning fails."""
MIN_GAIN_FOR_TRIAL = 0.03
"""A trial may lead to another plan. It is tried too when it is better by more than this share."""
EQUAL, ALL_NODES = "the best equal batch sizes", "the best plan of all nodes"
"""Plans that are tried to compare the best plan with."""


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

    def end_run(self, *error: Any) -> None:
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
                self.end_run()
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
        run = self._start([rank.node for rank in ranks])
        self._say(f"trying the plan: {num_steps} steps of all {len(ranks)} ranks")
        try:
            result = run.take_steps(ranks, num_steps)
        except CsdctlError:
            self.end_run()
            raise
        self.measuring_s += result.wall_s
        return result

    def _start(self, names: Sequence[str]) -> TuningRun:
        """Return a run of these machines."""
        fleet, facts = self._space.fleet, self._space.facts
        ranks = [
            RankPlan(
                node=name, batch_size=int(name in self.peaks), **asdict(default_runtime(name, fleet, facts))
            )
            for name in names
        ]
        if self._run and self._run.ranks != ranks:
            self.end_run()
        if not self._run:
            self._say(f"starting TensorFlow on {format_count(names, 'machine')}")
            self._run = TuningRun(ranks, self._context)
            self.start_s = max(self.start_s, self._run.start_s)
        return self._run

    def _fits(self, name: str, size: int) -> bool:
        """Return whether a batch may fit into a machine's memory."""
        usable_bytes = rank_memory_bytes(self._space.facts[name].usable_memory_bytes)
        peaks = self.peaks[name]
        if not usable_bytes or size <= max(peaks, default=0):
            return True
        return (predict_peak_bytes(peaks, size) or 0) <= usable_bytes

    def _note(self, probed: Probed) -> ProbeOutcome:
        """Return the outcome of a probe, and note the memory that it took."""
        size, peaks = probed.batch_size, self.peaks[probed.node]
        if probed.step_time_s is None:
            return ProbeOutcome(size, None, is_oom_kill=True)
        # The peak of a process never falls: only a size larger than all before shows its own.
        if size > max(peaks, default=0):
            peaks[size] = probed.peak_memory_bytes
        return ProbeOutcome(size, probed.step_time_s, probed.num_steps, peaks.get(size, 0))


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
        """Measure until the best plan has been tried.

        Raises TuningError when no plan is within the limits, and what probes and the ranks of a trial raise.
        """
        model = self._measure_steps(self._measure_sums(model))
        if factor := self.measurements.recall_overhead(model):
            model = replace(model, overhead_factor=factor)
        limits = self.limits
        if self.noise_scale is not None:
            reference_batch = self.context.job.recipe.reference_batch
            limits = limit_for_goodput(model, limits, self.noise_scale, reference_batch)
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
        model = replace(model, collective_cost=fit_collective(self.measurements.collectives()))
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
        while sizes := next_probes(model, self.limits):
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
            gain = rate / predict_samples_per_s(model, best.batch_sizes) - 1
            is_last = not self.measurer.num_probes or len(tried) == MAX_TRIALS
            if is_last or gain < MIN_GAIN_FOR_TRIAL:
                return self._compare(model, limits, max(tried, key=_rate))

    def _compare(self, model: FleetModel, limits: Limits, tried: TriedPlan) -> TunedFleet:
        """Return the fastest of the tried plan, the best equal batch sizes, and the best plan of all nodes.

        Equal sizes are tried only when the model, which was fitted to the trials before, predicts that they
        may be faster: the range of their forecast reaches the plan's throughput. All nodes are tried when the
        plan leaves some out.
        """
        equal = choose_equal_plan(model, limits)
        plans: dict[str, BestPlan] = {}
        rates: dict[str, float] = {}
        with suppress(TuningError):
            if tried.best.left_out:
                complete = replace(model, required=frozenset(model.machines))
                plans[ALL_NODES] = choose_plan(complete, limits)
        if equal and limits.global_batch in (None, equal.global_batch):
            spread = self.measurements.forecast_errors().spread
            if equal.batch_sizes == tried.best.batch_sizes:
                rates[EQUAL] = _rate(tried)
            elif spread.range_of(equal.prediction.samples_per_s)[1] > _rate(tried):
                plans[EQUAL] = equal
        best = tried
        for name, plan in plans.items():
            self._say(f"trying {name}")
            try:
                model, compared = self._try(model, plan)
            except CsdctlError as error:  # the first plan remains
                self._say(f"{name} could not be tried: {error.message}")
                continue
            rates[name] = _rate(compared)
            best = max(best, compared, key=_rate)
        gains = {name: _rate(best) / rate - 1 for name, rate in rates.items()}
        return TunedFleet(limits, model, best, gains.get(EQUAL), gains.get(ALL_NODES) or None)

    def _try(
        self, model: FleetModel, best: BestPlan, duration_s: float = TRIAL_S
    ) -> tuple[FleetModel, TriedPlan]:
        """Return the model after a trial of a plan, which is stored, and the trial."""
        ranks = plan_ranks(model, best)
        num_steps = min(MAX_STEPS, max(MIN_STEPS, round(duration_s / best.prediction.step_s)))
        tried = TriedPlan(best, ranks, self.measurer.run_trial(ranks, num_steps))
        return self.measurements.learn_trial(model, tried), tried

    def _limit_memory(self, model: FleetModel, machine: str, batch_size: int) -> FleetModel:
        """Continue with smaller micro-batches on `machine` after its rank ran out of memory in a trial.

        The failure is not stored as a measurement: another process on that machine may be the cause.
        """
        at_once = model.class_of(machine).limit_at_once(batch_size)
        members = model.class_of(machine).with_out_of_memory(batch_size)
        self._say(
            f"{machine}: {at_once} samples at once did not fit in memory together with the other ranks; "
            f"planning for at most {members.max_at_once}"
        )
        return model.with_class(model.class_name(machine), members)


def _rate(tried: TriedPlan) -> float:
    return tried.result.samples_per_s


def tune_by_fit(context: RunContext, options: TuneOptions, noise_scale: float | None = None) -> Plan:
    """Return the best plan within `options.limits`: of the highest throughput, or of the best goodput.

    `noise_scale`: gradient noise scale in samples, for goodput. Raises TuningError when no plan is possible,
    and what probes and a trial's ranks raise.
    """
    job, prepared, space, say = context.job, context.prepared, context.space, context.events.say
    private = prepared.num_private
    num_samples = prepared.public.num_samples + sum(private.values())
    limits = default_limits(options.limits, job.recipe.reference_batch, num_samples, 1 + len(private))
    properties = prepared.model.describe()
    if prepared.recipe.compression == BF16:
        properties = replace(properties, number_bytes=HALVED_BYTES)
    measurements = FleetMeasurements(
        properties,
        hash_recipe(job, prepared.public),
        space.fleet,
        space.facts,
        store=MeasurementStore(space.project.measurements, say, is_optional=True, is_fresh=options.is_fresh),
        errors=list_forecast_errors(space.project),
        is_host_training=options.is_host_training,
    )
    model = measurements.recall_fleet(required=list(private))
    model = replace(model, private_shares={name: count / num_samples for name, count in private.items()})
    with FleetMeasurer(context, is_host_training=options.is_host_training) as measurer:
        tuned = FitTuner(
            context,
            measurer,
            measurements,
            limits,
            probe_duration_s=options.probe_duration_s,
            noise_scale=noise_scale,
        ).tune(model)
    tried, errors = tuned.tried, measurements.forecast_errors()
    predicted = confirmed_prediction(
        [rank.batch_size for rank in tried.ranks],
        tried.result,
        errors,
        predict_host_samples_per_s(tuned.model, tuned.limits),
        gain=tuned.gain,
        gain_without_nodes=tuned.gain_without_nodes,
    )
    ranks = [rank.with_step(rank.batch_size, tried.compute_s[rank.node]) for rank in tried.ranks]
    plan = build_plan(context, measurer, ranks, FIT, {**tuned.limits.given})
    plan = plan.model_copy(update={"predicted": predicted, "left_out": list(tried.best.left_out)})
    if not options.is_host_training or len(plan.ranks) == 1 or options.strategy == DATA_PARALLEL:
        return plan
    return StrategyChooser(
        options.strategy,
        options.cut,
        context,
        plan,
        tuned=tuned,
        errors=errors,
        start_s=space.opening_s + prepared.again_s + measurer.start_s,
        process_s=measurer.start_s,
    ).choose()


def build_plan(
    context: RunContext,
    measurer: FleetMeasurer,
    ranks: list[RankPlan],
    method: str,
    arguments: dict[str, float | list[int]],
) -> Plan:
    """Return the plan with these ranks, and how it was measured. `arguments` of the method."""
    return Plan(
        job=context.job.name,
        job_fingerprint=context.job.fingerprint(),
        method=method,
        emulated=context.space.fleet.emulated,
        method_arguments=arguments,
        num_probes=measurer.num_probes,
        measuring_s=round(measurer.measuring_s, 2),
        ranks=ranks,
    )
