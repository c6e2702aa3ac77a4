"""`tune`: measure on the machines and save a plan, by Algorithm 1 or by the fit method.

The fit method takes few probes of each machine class, the cost of a sum, then a trial of the best plan. The
model of the fleet is an immutable value (csdctl/tuning/fleet_model.py). Each round measures, stores the
measurements in the measurements file, and continues with the model updated from them. A second tuning run
starts from the file: it needs no probe, and one trial confirms its plan.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

from csdctl.errors import InputError, NodeError, OutOfMemoryError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.mpirun import find_mpirun
from csdctl.notify import Say
from csdctl.perfmodel.prediction import calibrate_overhead
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import MeasurementStore
from csdctl.tuning.fits import Point, fit_collective
from csdctl.tuning.fleet_model import FleetModel, ProbeOutcome, TriedPlan, learn_probes, learn_trial
from csdctl.tuning.measurements import CollectiveMeasurement, describe_model, describe_runtime
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from csdctl.tuning.plan_choice import (
    choose_equal_plan,
    choose_plan,
    confirmed_prediction,
    limit_for_goodput,
    limit_sizes,
    measured_ranks,
    next_probes,
    next_settings,
    plan_ranks,
    plan_settings_search,
    predict_samples_per_s,
    settings_gain,
)
from csdctl.tuning.search import BestPlan, Limits, default_limits
from csdctl.tuning.stannis import TunedBatch, tune_stannis
from csdctl.worker.protocol.events import EpochEnd
from csdctl.worker.protocol.orders import MAX_TIMED_SUM_S
from csdctl.worker.protocol.probe import ProbeRequest
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.data.deploy import common_files, deploy_files
from csdctl.workflows.data.prepare import PreparationObserver, prepare_in
from csdctl.workflows.train.plan import build_fingerprint, default_runtime
from csdctl.workflows.train.spec import RunContext
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe
from csdctl.workflows.tune.options import FIT, STANNIS, THROUGHPUT, TuneOptions
from csdctl.workflows.tune.probing import FleetMeasurer, TuneWatch
from csdctl.workflows.tune.strategies import StrategyChooser, check_possible
from csdctl.workflows.workspace.workspace import open_workspace

SUM_BYTES = (1 << 16, 1 << 20, 1 << 23)
"""Sizes of the vectors whose sums are timed, besides the model's own."""
TRIAL_S = 5.0
MIN_STEPS, MAX_STEPS = 2, 1000
"""Limits of the number of steps of a trial."""
MAX_TRIALS = 2
MAX_OOM_RETRIES = 3
"""Trials in which a rank runs out of memory before tuning fails."""
MIN_GAIN_FOR_TRIAL = 0.03
"""A trial may lead to another plan; that plan is tried too when it is better by more than this share."""


@dataclass(frozen=True)
class TunedFleet:
    """The result of a tuning run."""

    limits: Limits
    """Those of the plan: the global batch size may have been chosen for time to accuracy."""
    model: FleetModel
    tried: TriedPlan
    """The plan that reached the most samples/s in a trial."""
    gain: float | None = None
    """Gain in samples/s over the best equal batch size, as a share, at least 0; None: it was not tried."""


@dataclass(frozen=True)
class FitTuner:
    """The rounds of a tuning run: each takes a model of the fleet, and returns the updated model."""

    measurer: FleetMeasurer
    measurements: FleetMeasurements
    limits: Limits
    say: Say
    is_exploring: bool = True
    probe_duration_s: float = 1.0
    noise_scale: float | None = None
    """Gradient noise scale in samples, to choose the global batch size by goodput; None: by throughput."""

    def tune(self, model: FleetModel) -> TunedFleet:
        """Measure until the best plan has been tried.

        Raises TuningError when no plan is within the limits, and what probes and the ranks of a trial raise.
        """
        model = self._measure_collectives(model)
        model = self._measure_steps(limit_sizes(model, self.limits))
        if self.is_exploring:
            model = self._measure_steps(self._explore_settings(model))
        factor = 1.0
        if recalled := self.measurements.recall_trial(model.step_times()):
            ranks, step_s = recalled
            factor = calibrate_overhead(ranks, step_s, model.sum_s(len(ranks)))
        model = replace(model, overhead_factor=factor)
        if self.noise_scale is None:
            return self._confirm(model)
        limits = limit_for_goodput(model, self.limits, self.noise_scale)
        self.say(
            f"gradient noise scale {self.noise_scale:,.0f} samples: "
            f"a global batch of {limits.largest_global_batch} reaches a loss soonest"
        )
        return replace(self, limits=limits)._confirm(model)

    def _measure_collectives(self, model: FleetModel) -> FleetModel:
        num_ranks = len(model.machines) + (not model.is_host_training)
        known = self.measurements.collectives()
        if not any(_covers(sums, num_ranks, model.vector_bytes) for sums in known):
            self.say(f"timing sums over {num_ranks} ranks")
            sizes = [
                (ranks, size)
                for ranks in sorted({min(2, num_ranks), num_ranks})
                for size in sorted({*SUM_BYTES, model.vector_bytes})
            ]
            known = [*known, *self.measurements.store_collectives(self.measurer.time_sums(sizes))]
        model = replace(model, collective_cost=fit_collective(known))
        self.say(
            f"a sum of the model's {model.vector_bytes / 1e6:.1f} MB over {num_ranks} ranks takes "
            f"{model.sum_s(num_ranks) * 1000:.1f} ms"
        )
        return model

    def _measure_steps(self, model: FleetModel) -> FleetModel:
        """Probe until the step time of every class is known where it matters."""
        while sizes := next_probes(model, self.limits):
            outcomes = self._probe(
                {name: (model.class_of(name).settings, sizes.get(name)) for name in model.machines}
            )
            self.measurements.store_probes(model, outcomes)
            model = learn_probes(model, outcomes)
        return model

    def _probe(self, probes: Mapping[str, tuple[Runtime, int | None]]) -> dict[str, ProbeOutcome]:
        """Start machines with the settings, and measure those with a batch size."""
        self.measurer.switch({name: settings for name, (settings, _) in probes.items()})
        # A new size costs one step to allocate memory and choose kernels; the next one shows its time.
        return self.measurer.measure(
            {
                name: ProbeRequest(size, min_steps=1, min_duration_s=self.probe_duration_s, warm_up_steps=1)
                for name, (_, size) in probes.items()
                if size
            }
        )

    def _explore_settings(self, model: FleetModel) -> FleetModel:
        """Probe other runtime settings of new classes, and select those that are clearly faster."""
        search = plan_settings_search(model, self.limits)
        while True:
            probes, search = next_settings(model, search)
            if not probes:
                return model
            outcomes = self._probe(probes)
            others = [name for name in probes if probes[name][0] != model.class_of(name).settings]
            usual = {name: outcome for name, outcome in outcomes.items() if name not in others}
            self.measurements.store_probes(model, usual)
            model = learn_probes(model, usual)
            for name in others:
                model = self._compare_settings(model, name, probes[name][0], outcomes[name])

    def _compare_settings(
        self, model: FleetModel, machine: str, settings: Runtime, outcome: ProbeOutcome
    ) -> FleetModel:
        """Return the model after a probe with other settings, which the class takes if they are faster."""
        known = model.class_of(machine)
        known = replace(known, num_new_probes=known.num_new_probes + 1)
        if outcome.step_time_s is not None:
            self.measurements.store_class_probes(machine, settings, [outcome])
            probed = Point(outcome.batch_size, outcome.step_time_s)
            if gain := settings_gain(known, probed):
                self.say(f"{machine}: {describe_runtime(settings)}: takes {gain:.0%} less time: selected")
                known = replace(known, settings=settings, points=(probed,))
        return model.with_class(model.class_name(machine), known)

    def _confirm(self, model: FleetModel) -> TunedFleet:
        """Try the best plan, and another plan when the trial predicts a gain; return the better one."""
        tried: list[TriedPlan] = []
        num_oom = 0
        while True:
            best = choose_plan(model, self.limits)
            try:
                tried.append(self._try(model, best))
            except OutOfMemoryError as error:
                num_oom += 1
                if num_oom > MAX_OOM_RETRIES or error.node not in best.batch_sizes:
                    raise
                model = self._limit_memory(model, error.node, best.batch_sizes[error.node])
                continue
            model = learn_trial(model, tried[-1])
            self.measurements.store_trial(model, tried[-1])
            gain = self._gain_of_another(model, best)
            is_last = not self.measurer.num_probes or len(tried) == MAX_TRIALS
            if is_last or gain < MIN_GAIN_FOR_TRIAL:
                return self._compare_with_equal(model, max(tried, key=_rate))

    def _compare_with_equal(self, model: FleetModel, tried: TriedPlan) -> TunedFleet:
        """Return the tried plan, or that of equal batch sizes if these are faster.

        These are tried only when the model, which was fitted to the trials before, predicts that they may be:
        the range of their forecast reaches the plan's throughput.
        """
        equal = choose_equal_plan(model, self.limits)
        if equal is None or self.limits.global_batch not in (None, sum(equal.batch_sizes.values())):
            return TunedFleet(self.limits, model, tried)
        if equal.batch_sizes == tried.best.batch_sizes:
            return TunedFleet(self.limits, model, tried, 0.0)
        _, highest = self.measurements.forecast_errors().spread.range_of(equal.prediction.samples_per_s)
        if highest <= _rate(tried):
            return TunedFleet(self.limits, model, tried)
        size = next(iter(equal.batch_sizes.values()))
        self.say(f"equal batch sizes of {size} may be faster: trying them")
        try:
            other = self._try(model, equal)
        except OutOfMemoryError:
            return TunedFleet(self.limits, model, tried)
        model = learn_trial(model, other)
        self.measurements.store_trial(model, other)
        best = max(tried, other, key=_rate)
        return TunedFleet(self.limits, model, best, _rate(best) / _rate(other) - 1)

    def _try(self, model: FleetModel, best: BestPlan) -> TriedPlan:
        ranks = plan_ranks(model, best)
        num_steps = min(MAX_STEPS, max(MIN_STEPS, round(TRIAL_S / best.prediction.step_s)))
        return TriedPlan(best, ranks, self.measurer.run_trial(ranks, num_steps))

    def _limit_memory(self, model: FleetModel, machine: str, batch_size: int) -> FleetModel:
        """Continue with smaller micro-batches on `machine` after its rank ran out of memory in a trial.

        The failure is not stored as a measurement: another process on that machine may be the cause.
        """
        at_once = model.class_of(machine).limit_at_once(batch_size)
        known = model.class_of(machine).with_out_of_memory(batch_size)
        model = model.with_class(model.class_name(machine), known)
        self.say(
            f"{machine}: {at_once} samples at once did not fit in memory together with the other ranks; "
            f"planning for at most {known.max_at_once}"
        )
        return model

    def _gain_of_another(self, model: FleetModel, best: BestPlan) -> float:
        """Return the predicted gain of the plan that is best now over the one that was tried."""
        rate = choose_plan(model, self.limits).prediction.samples_per_s
        return rate / predict_samples_per_s(model, best.batch_sizes) - 1


def _rate(tried: TriedPlan) -> float:
    return tried.result.samples_per_s


def _covers(sums: CollectiveMeasurement, num_ranks: int, num_bytes: int) -> bool:
    """Return whether a sum over the ranks was timed that is as large, or nearly too slow to be timed."""
    forecast_s = sums.seconds * num_bytes / max(1, sums.num_bytes)
    return sums.num_ranks == num_ranks and (sums.num_bytes >= num_bytes or forecast_s > MAX_TIMED_SUM_S)


CONFIRM_DURATION_S = 3.0


def tune_by_algorithm_1(context: RunContext, options: TuneOptions, watch: TuneWatch) -> Plan:
    """Return the plan of Algorithm 1; raises TuningError, NodeError, and what probes raise."""
    job, space = context.job, context.space
    machines = space.fleet.machines
    runtimes = {name: default_runtime(name, space.fleet, space.facts) for name in machines}
    with FleetMeasurer(context, runtimes, watch) as rounds:

        def step_times(sizes: Mapping[str, int], duration_s: float) -> dict[str, float | None]:
            requests = {name: ProbeRequest(size, min_duration_s=duration_s) for name, size in sizes.items()}
            return {name: outcome.step_time_s for name, outcome in rounds.measure(requests).items()}

        tuned = tune_stannis(
            machines,
            lambda sizes: step_times(sizes, options.probe_duration_s),
            batch_sizes=options.batch_sizes,
            step_divisor=options.step_divisor,
            margin_scale=options.margin_scale,
        )
        # Again, for longer: a run's efficiency is computed from what the ranks reach alone.
        context.observer.say("confirming the chosen batch sizes")
        confirmed = step_times({name: batch.batch_size for name, batch in tuned.items()}, CONFIRM_DURATION_S)
        ranks = [
            _rank_plan(name, batch, confirmed[name], runtimes[name], rounds.probers[name].peaks)
            for name, batch in tuned.items()
        ]
    return Plan(
        job=job.name,
        job_fingerprint=job.fingerprint(),
        method=STANNIS,
        emulated=space.fleet.emulated,
        method_arguments={
            "batch_sizes": list(options.batch_sizes),
            "C": options.step_divisor,
            "E": options.margin_scale,
        },
        num_probes=rounds.num_probes,
        measuring_s=round(rounds.measuring_s, 2),
        ranks=ranks,
    )


def _rank_plan(
    name: str, tuned: TunedBatch, step_time_s: float | None, runtime: Runtime, peaks: Mapping[int, int]
) -> RankPlan:
    if step_time_s is None:
        raise NodeError(
            f"batch size {tuned.batch_size} fitted in memory at first, but not when it was confirmed",
            node=name,
            remedy="check what else uses that machine's memory, or use smaller --batch-sizes",
        )
    size = tuned.batch_size
    rank = RankPlan(node=name, batch_size=size, threads=runtime.threads, peak_memory_bytes=peaks.get(size))
    return rank.with_step(size, step_time_s)


class TuneObserver(PreparationObserver, Protocol):
    """Shows one `csdctl tune`."""

    def measuring(self, machines: Sequence[str], /) -> AbstractContextManager[TuneWatch]:
        """Open a view of what the machines do; lines of text may be shown meanwhile."""


def tune_job(job: Job, fleet: Fleet, directory: Path, options: TuneOptions, observer: TuneObserver) -> Plan:
    """Prepare `job`, deploy what probes need, tune, and save the plan in the project of `directory`.

    Raises what `open_workspace`, `prepare_job`, `deploy_files` and `tune` raise.
    """
    if options.method == FIT:
        find_mpirun()  # the plan is tried with MPI
    with open_workspace(directory, fleet, "tune", is_locking=True, say=observer.say) as space:
        prepared = prepare_in(space, job, observer)
        files = {node.name: common_files(prepared) for node in space.fleet.nodes}
        deploy_files(files, space.fleet, space.sessions, lambda *_: None)
        with observer.measuring(space.fleet.machines) as watch:
            plan = tune(RunContext(job, prepared, space, observer), options, watch)
        save_plan(space.project.plan(job.name), plan)
    return plan


def tune(context: RunContext, options: TuneOptions, watch: TuneWatch) -> Plan:
    """Return a plan for the job; raises InputError, DeadlineError, NodeError, and what a trial raises."""
    if not options.is_host_training and (options.method == STANNIS or not context.space.fleet.nodes):
        raise InputError("--no-host needs at least one node, and --method fit")
    check_possible(options, context.job, context.prepared)
    tune_by_method = tune_by_algorithm_1 if options.method == STANNIS else tune_by_fit
    plan = tune_by_method(context, options, watch)
    return plan.model_copy(update={"made_for": build_fingerprint(plan, context.job, context.space.facts)})


def find_noise_scale(project: ProjectDirectory, job: str) -> float:
    """Return the gradient noise scale of the latest run of `job` that knows it, in samples.

    Raises InputError when no run does.
    """
    for run_id in reversed(project.run_ids()):
        with suppress(InputError):  # a foreign or damaged directory
            run = project.find_run(run_id)
            plan = run.load_manifest()["plan"]
            if plan["job"] != job:
                continue
            events = run.read_events([rank["node"] for rank in plan["ranks"]]).skim()
            ends = (event for _, event in events if isinstance(event, EpochEnd))
            if scales := [end.noise_scale for end in ends if end.noise_scale is not None]:
                return median(scales)
    raise InputError(
        f"no run of {job} has a gradient noise scale, which needs two ranks that train",
        remedy="train first, such as `csdctl train --max-steps 100`, then tune again",
    )


def tune_by_fit(context: RunContext, options: TuneOptions, watch: TuneWatch) -> Plan:
    """Return the best plan within `options.limits`: of the highest throughput, or as `options.goal` says.

    Raises TuningError when no plan is possible, and what probes and a trial's ranks raise.
    """
    is_for_throughput = options.goal == THROUGHPUT
    noise_scale = None if is_for_throughput else find_noise_scale(context.space.project, context.job.name)
    job, prepared, space, say = context.job, context.prepared, context.space, context.observer.say
    num_public, private = prepared.public.num_samples, prepared.num_private
    num_samples = num_public + sum(private.values())
    limits = default_limits(options.limits, job.recipe.reference_batch, num_samples, 1 + len(private))
    path, is_fresh = space.project.measurements, options.is_fresh
    store = MeasurementStore(path, say, is_optional=True, is_fresh=is_fresh)
    measurements = FleetMeasurements(
        describe_model(prepared.model.info, prepared.model.architecture.sha256),
        hash_recipe(job, prepared.public),
        space.fleet,
        space.facts,
        store,
        is_host_training=options.is_host_training,
    )
    model = measurements.recall_fleet(required=list(private))
    model = replace(model, max_host_share=num_public / (num_samples or 1))
    runtimes = {name: model.class_of(name).settings for name in model.machines}
    with FleetMeasurer(context, runtimes, watch) as measurer:
        busy = measurer.find_other_work()
        how = options.is_exploring, options.probe_duration_s, noise_scale
        tuned = FitTuner(measurer, measurements, limits, say, *how).tune(model)
    errors = measurements.forecast_errors()
    plan = Plan(
        job=job.name,
        job_fingerprint=job.fingerprint(),
        method=FIT,
        emulated=space.fleet.emulated,
        method_arguments={**tuned.limits.given},
        num_probes=measurer.num_probes,
        measuring_s=round(measurer.measuring_s, 2),
        predicted=confirmed_prediction(tuned.tried.ranks, tuned.tried.result, errors, tuned.gain),
        busy=busy,
        left_out=list(tuned.tried.best.left_out),
        ranks=measured_ranks(tuned.tried),
    )
    if not options.is_host_training or len(plan.ranks) == 1:
        return plan
    start_s = space.opening_s + prepared.again_s + measurer.start_s + tuned.tried.result.fixed_s
    process_s = measurer.start_s
    chooser = StrategyChooser(options, context, plan, tuned.model, tuned.limits, start_s, process_s, watch)
    return chooser.choose()
