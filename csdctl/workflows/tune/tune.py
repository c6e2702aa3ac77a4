"""`tune`: measure on the machines and save a plan, by Algorithm 1 or by the fit method.

The fit method takes few probes of each machine class, the cost of a sum, then a trial of the best plan. The
model of the fleet is an immutable value (csdctl/tuning/fleet_model.py). Each round measures, stores the
measurements in the measurements file, and continues with the model updated from them. A second tuning run
starts from the file: it needs no probe, and one trial confirms its plan.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from csdctl.errors import CsdctlError, InputError, NodeError, OutOfMemoryError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.launch.mpirun import find_mpirun
from csdctl.notify import Say
from csdctl.perfmodel.prediction import calibrate_overhead
from csdctl.reporting.numbers import format_seconds
from csdctl.reporting.results import list_forecast_errors, read_results
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import MeasurementStore
from csdctl.tuning.fleet_model import (
    FleetModel,
    ProbeOutcome,
    TriedPlan,
    fit_collective,
    learn_probes,
    learn_trial,
)
from csdctl.tuning.measurements import (
    HALVED_BYTES,
    CollectiveMeasurement,
    ForecastErrors,
    Point,
    describe_runtime,
)
from csdctl.tuning.plan import (
    DATA_PARALLEL,
    FEATURES,
    SPLIT,
    Plan,
    RankPlan,
    Strategy,
    StrategyPlan,
    save_plan,
)
from csdctl.tuning.plan_choice import (
    choose_class_sizes,
    choose_equal_plan,
    choose_plan,
    confirmed_prediction,
    limit_for_goodput,
    limit_sizes,
    next_probes,
    next_settings,
    plan_ranks,
    plan_settings_search,
    predict_host_samples_per_s,
    predict_samples_per_s,
    settings_gain,
)
from csdctl.tuning.search import BestPlan, Limits, default_limits
from csdctl.tuning.stannis import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_MARGIN_SCALE,
    DEFAULT_STEP_DIVISOR,
    TuningError,
    check_arguments,
    tune_stannis,
)
from csdctl.tuning.strategies import (
    MEASURED_BATCH,
    Shares,
    StrategyForecast,
    Training,
    add_range,
    choose_strategy,
    measured_shares,
    share_by_flops,
    spread_cuts,
)
from csdctl.worker.protocol.features import FLOAT32
from csdctl.worker.protocol.model_info import CutInfo
from csdctl.worker.protocol.probe import PartsSpec, PartTimes, ProbeRequest
from csdctl.worker.protocol.recipe import BF16
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.data.compile import as_prefix
from csdctl.workflows.data.files import deploy_files
from csdctl.workflows.data.prepare import prepare_in
from csdctl.workflows.train.features import bytes_for_host, find_features
from csdctl.workflows.train.plan import build_fingerprint, default_runtime
from csdctl.workflows.train.request import AUTO, check_strategy
from csdctl.workflows.train.spec import RunContext
from csdctl.workflows.train.strategies import check_split, find_cut
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe
from csdctl.workflows.tune.probing import PROBE_DEADLINE_S, FleetMeasurer, run_trial
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import call_machine, open_workspace

TUNING_HELP = "see `csdctl tune --help`"
THROUGHPUT: Final = "throughput"
TIME_TO_ACCURACY: Final = "time-to-accuracy"
FIT: Final = "fit"
STANNIS: Final = "stannis"
SUM_BYTES = (1 << 16, 1 << 20, 1 << 23)
MAX_TRIALS = 2
MAX_OOM_RETRIES = 3
MIN_GAIN_FOR_TRIAL = 0.03
CONFIRM_DURATION_S = 3.0
MIN_PROMISE = 0.1
MAX_CUTS = 5


@dataclass(frozen=True)
class TuneOptions:
    """The method, the limits of a plan, and how to measure. Raises InputError for invalid values."""

    method: Literal["fit", "stannis"] = FIT
    """'fit', or 'stannis' for Algorithm 1."""
    limits: Limits = field(default_factory=Limits)
    """Of the global batch."""
    is_fresh: bool = False
    """Ignore earlier measurements."""
    is_exploring: bool = True
    """Probe other runtime settings too."""
    is_host_training: bool = True
    """False: the host only sums gradients and serves data to the nodes."""
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    """Algorithm 1's list."""
    step_divisor: float = DEFAULT_STEP_DIVISOR
    """Algorithm 1's C."""
    margin_scale: float = DEFAULT_MARGIN_SCALE
    """Algorithm 1's E."""
    probe_duration_s: float = 1.0
    """The shortest time of one measurement."""
    strategy: str = AUTO
    """The strategy: 'data-parallel', 'features' or 'split'; 'auto' compares all."""
    goal: Literal["throughput", "time-to-accuracy"] = THROUGHPUT
    """What the plan has the most of: 'throughput', or with 'time-to-accuracy' progress per second."""
    cut: str = ""
    """With the strategy `split`: the only cut."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy, self.cut)
        if self.strategy in (FEATURES, SPLIT) and (self.method != FIT or not self.is_host_training):
            raise InputError(
                f"--strategy {self.strategy} needs --method {FIT}, and a host that trains",
                remedy="leave out --method and --no-host, or the strategy",
            )
        if self.method != FIT and self.limits.given:
            raise InputError(
                f"{self.method} takes no limits, received {', '.join(self.limits.given)}",
                remedy=f"leave them out, or use --method {FIT}",
            )
        if self.goal == TIME_TO_ACCURACY and (self.method != FIT or self.limits.global_batch):
            raise InputError(
                f"--for {TIME_TO_ACCURACY} chooses the global batch size, with --method {FIT}",
                remedy="leave out --global-batch and --method, or --for",
            )
        of_paper = self.batch_sizes, self.step_divisor, self.margin_scale
        defaults = DEFAULT_BATCH_SIZES, DEFAULT_STEP_DIVISOR, DEFAULT_MARGIN_SCALE
        if self.method != STANNIS and of_paper != defaults:
            raise InputError(
                f"{self.method} does not take --batch-sizes, -C and -E",
                remedy=f"leave them out, or use --method {STANNIS}",
            )
        check_arguments(*of_paper)
        if not 0 <= self.probe_duration_s < PROBE_DEADLINE_S:
            raise InputError(
                f"--probe-seconds must be at least 0 and below {PROBE_DEADLINE_S:g}, "
                f"received {self.probe_duration_s}",
                remedy=TUNING_HELP,
            )


"""Sizes of the vectors whose sums are timed, besides the model's own, which is the largest."""
FIRST_TRIAL_S, TRIAL_S = 2.0, 3.0
"""Predicted duration of a trial; the first one after probes, which may lead to a second, is shorter."""
MIN_STEPS, MAX_STEPS = 2, 1000
"""Limits of the number of steps of a trial."""
"""Trials in which a rank runs out of memory before tuning fails."""
EQUAL, ALL_NODES = "the best equal batch sizes", "the best plan of all nodes"
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
    gain_without_nodes: float | None = None
    """That over the best plan of all nodes; None: no node is left out, or it was not tried."""


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
    reference_batch: int = 1
    """Samples for which the recipe states its learning rate."""

    def tune(self, model: FleetModel) -> TunedFleet:
        """Measure until the best plan has been tried.

        Raises TuningError when no plan is within the limits, and what probes and the ranks of a trial raise.
        """
        model = self._measure_collectives(model)
        model = self._measure_steps(limit_sizes(model, self.limits))
        if self.is_exploring:
            model = self._measure_steps(self._explore_settings(model))
        if recalled := self.measurements.recall_trial(model.step_times()):
            ranks, step_s = recalled
            factor = calibrate_overhead(ranks, step_s, model.sum_s(len(ranks)))
            model = replace(model, overhead_factor=factor)
        if self.noise_scale is None:
            return self._confirm(model)
        limits = limit_for_goodput(model, self.limits, self.noise_scale, self.reference_batch)
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
            smaller = [size for size in SUM_BYTES if size < model.vector_bytes]
            timed = self.measurer.time_sums([*smaller, model.vector_bytes], [2])
            known = [*known, *self.measurements.store_collectives(timed)]
        model = replace(model, collective_cost=fit_collective(known))
        self.say(
            f"a sum of the model's {model.vector_bytes / 1e6:.1f} MB over {num_ranks} ranks takes "
            f"{model.sum_s(num_ranks) * 1000:.1f} ms"
        )
        return model

    def _measure_steps(self, model: FleetModel) -> FleetModel:
        """Probe until the step time of every class is known where it matters."""
        known: dict[str, int] = {}
        self.measurer.switch({name: model.class_of(name).settings for name in model.machines})
        while sizes := next_probes(model, partial(choose_class_sizes, model, self.limits)):
            known |= sizes
            if self.measurements.is_emulated:  # its host is slower while nodes compute, as they will
                sizes = known
            outcomes = self._probe(
                {name: (model.class_of(name).settings, sizes.get(name)) for name in model.machines}
            )
            self.measurements.store_probes(model, outcomes)
            model = learn_probes(model, outcomes)
        return model

    def _probe(self, probes: Mapping[str, tuple[Runtime, int | None]]) -> dict[str, ProbeOutcome]:
        """Measure the machines that have a batch size, with these settings."""
        # A new size costs one step to allocate memory and choose kernels; the next one shows its time.
        return self.measurer.measure(
            {
                name: (
                    settings,
                    ProbeRequest(size, min_steps=1, min_duration_s=self.probe_duration_s, warm_up_steps=1),
                )
                for name, (settings, size) in probes.items()
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
            # What was measured beside a rank may not have had the memory that the rank will have.
            usual = {name: one for name, one in outcomes.items() if name not in others and one.step_time_s}
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
        """Try the best plan, and another plan when the trial predicts a gain. Return the better one."""
        tried: list[TriedPlan] = []
        num_oom = 0
        while True:
            best = choose_plan(model, self.limits)
            try:
                may_follow = self.measurer.num_probes and not tried
                tried.append(self._try(model, best, FIRST_TRIAL_S if may_follow else TRIAL_S))
            except OutOfMemoryError as error:
                num_oom += 1
                if num_oom > MAX_OOM_RETRIES or error.node not in best.batch_sizes:
                    raise
                model = self._limit_memory(model, error.node, best.batch_sizes[error.node])
                continue
            model = learn_trial(model, tried[-1])
            self.measurements.store_trial(model, tried[-1])
            rate = choose_plan(model, self.limits).prediction.samples_per_s
            gain = rate / predict_samples_per_s(model, best.batch_sizes) - 1
            is_last = not self.measurer.num_probes or len(tried) == MAX_TRIALS
            if is_last or gain < MIN_GAIN_FOR_TRIAL:
                return self._compare_with_others(model, max(tried, key=_rate))

    def _compare_with_others(self, model: FleetModel, tried: TriedPlan) -> TunedFleet:
        """Return the fastest of the tried plan, the best equal batch sizes, and the best plan of all nodes.

        Equal sizes are tried only when the model, which was fitted to the trials before, predicts that they
        may be faster: the range of their forecast reaches the plan's throughput. All nodes are tried when the
        plan leaves some out.
        """
        equal = choose_equal_plan(model, self.limits)
        others: dict[str, BestPlan] = {}
        with suppress(TuningError):
            if tried.best.left_out:
                whole = replace(model, required=frozenset(model.machines))
                others[ALL_NODES] = choose_plan(whole, self.limits)
        gains: dict[str, float] = {}
        if equal and self.limits.global_batch in (None, sum(equal.batch_sizes.values())):
            spread = self.measurements.forecast_errors().spread
            if equal.batch_sizes == tried.best.batch_sizes:
                gains[EQUAL] = 0.0
            elif spread.range_of(equal.prediction.samples_per_s)[1] > _rate(tried):
                others[EQUAL] = equal
        best, found = tried, {}
        for name, plan in others.items():
            self.say(f"trying {name}")
            try:
                found[name] = other = self._try(model, plan)
            except CsdctlError as error:  # the first plan remains
                self.say(f"{name} could not be tried: {error.message}")
                continue
            model = learn_trial(model, other)
            self.measurements.store_trial(model, other)
            best = max(best, other, key=_rate)
        gains |= {name: _rate(best) / _rate(other) - 1 for name, other in found.items()}
        return TunedFleet(self.limits, model, best, gains.get(EQUAL), gains.get(ALL_NODES) or None)

    def _try(self, model: FleetModel, best: BestPlan, duration_s: float = TRIAL_S) -> TriedPlan:
        ranks = plan_ranks(model, best)
        num_steps = min(MAX_STEPS, max(MIN_STEPS, round(duration_s / best.prediction.step_s)))
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


def _rate(tried: TriedPlan) -> float:
    return tried.result.samples_per_s


def _covers(sums: CollectiveMeasurement, num_ranks: int, num_bytes: int) -> bool:
    """Return whether a sum over the ranks was timed that is as large."""
    return sums.num_ranks == num_ranks and sums.num_bytes >= num_bytes


def tune_by_algorithm_1(context: RunContext, options: TuneOptions) -> Plan:
    """Return the plan of Algorithm 1. Raises TuningError, NodeError, and what probes raise."""
    job, space = context.job, context.space
    machines = space.fleet.machines
    runtimes = {name: default_runtime(name, space.fleet, space.facts) for name in machines}
    with FleetMeasurer(context, runtimes) as rounds:

        def step_times(sizes: Mapping[str, int], duration_s: float) -> dict[str, float | None]:
            requests = {
                name: (runtimes[name], ProbeRequest(size, min_duration_s=duration_s))
                for name, size in sizes.items()
            }
            return {name: outcome.step_time_s for name, outcome in rounds.measure(requests).items()}

        tuned = tune_stannis(
            machines,
            lambda sizes: step_times(sizes, options.probe_duration_s),
            batch_sizes=options.batch_sizes,
            step_divisor=options.step_divisor,
            margin_scale=options.margin_scale,
        )
        # Again, for longer: a run's efficiency is computed from what the ranks reach alone.
        context.events.say("confirming the chosen batch sizes")
        confirmed = step_times({name: batch.batch_size for name, batch in tuned.items()}, CONFIRM_DURATION_S)
        ranks = [
            _rank_plan(name, batch, confirmed[name], runtimes[name], rounds.peaks[name])
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
    name: str, tuned: Point, step_time_s: float | None, runtime: Runtime, peaks: Mapping[int, int]
) -> RankPlan:
    if step_time_s is None:
        raise NodeError(
            f"batch size {tuned.batch_size} fitted in memory at first, but not when it was confirmed",
            node=name,
            remedy="check what else uses that machine's memory, or use smaller --batch-sizes",
        )
    size = tuned.batch_size
    rank = RankPlan(node=name, batch_size=size, peak_memory_bytes=peaks.get(size), **asdict(runtime))
    return rank.with_step(size, step_time_s)


def tune_job(job: Job, fleet: Fleet, directory: Path, options: TuneOptions, events: EventStream) -> Plan:
    """Prepare `job`, deploy what probes need, tune, and save the plan in the project of `directory`.

    Raises InputError, TuningError, NodeError, and what opening, preparing, probes and a trial raise.
    """
    if not fleet.host.trains:
        options = replace(options, is_host_training=False)
    if not options.is_host_training and (options.method == STANNIS or not fleet.nodes):
        raise InputError(f"a host that does not train needs at least one node, and --method {FIT}")
    noise_scale = None
    if options.goal == TIME_TO_ACCURACY:
        noise_scale = find_noise_scale(ProjectDirectory(directory), job.name)
    find_mpirun()  # probes and trials are those of linked ranks
    with open_workspace(directory, fleet, "tune", is_locking=True, say=events.say) as space:
        prepared = prepare_in(space, job, events)
        files = {node.name: prepared.files for node in space.fleet.nodes}
        deploy_files(files, space.fleet, space.sessions, EventStream())
        context = RunContext(job, prepared, space, events)
        check_possible(options, context)
        if options.method == STANNIS:
            plan = tune_by_algorithm_1(context, options)
        else:
            plan = tune_by_fit(context, options, noise_scale)
        plan = plan.model_copy(update={"made_for": build_fingerprint(plan, job, space.facts)})
        save_plan(space.project.plan(job.name), plan)
    return plan


def find_noise_scale(project: ProjectDirectory, job: str) -> float:
    """Return the gradient noise scale of the latest run of `job` that knows it, in samples.

    Raises InputError when no run does.
    """
    for run_id in reversed(project.run_ids()):
        with suppress(InputError):  # a foreign or damaged directory
            run = project.find_run(run_id)
            if run.load_manifest()["plan"]["job"] == job and (scale := read_results(run).summary.noise_scale):
                return scale
    raise InputError(
        f"no run of {job} has a gradient noise scale, which needs two ranks that train",
        remedy="train first, such as `csdctl train --max-steps 100`, then tune again",
    )


def tune_by_fit(context: RunContext, options: TuneOptions, noise_scale: float | None = None) -> Plan:
    """Return the best plan within `options.limits`: of the highest throughput, or of the best goodput.

    `noise_scale`: gradient noise scale in samples, for goodput. Raises TuningError when no plan is possible,
    and what probes and a trial's ranks raise.
    """
    job, prepared, space, say = context.job, context.prepared, context.space, context.events.say
    num_public, private = prepared.public.num_samples, prepared.num_private
    num_samples = num_public + sum(private.values())
    limits = default_limits(options.limits, job.recipe.reference_batch, num_samples, 1 + len(private))
    path, is_fresh = space.project.measurements, options.is_fresh
    store = MeasurementStore(path, say, is_optional=True, is_fresh=is_fresh)
    described = prepared.model.describe()
    if prepared.recipe.compression == BF16:
        described = replace(described, number_bytes=HALVED_BYTES)
    measurements = FleetMeasurements(
        described,
        hash_recipe(job, prepared.public),
        space.fleet,
        space.facts,
        store,
        list_forecast_errors(space.project),
        is_host_training=options.is_host_training,
    )
    model = measurements.recall_fleet(required=list(private))
    model = replace(model, private_shares={name: count / num_samples for name, count in private.items()})
    runtimes = {name: model.class_of(name).settings for name in model.machines}
    with FleetMeasurer(context, runtimes) as measurer:
        how = options.is_exploring, options.probe_duration_s, noise_scale, job.recipe.reference_batch
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
        predicted=confirmed_prediction(
            tuned.tried.ranks,
            tuned.tried.result,
            errors,
            tuned.gain,
            predict_host_samples_per_s(tuned.model, tuned.limits),
            tuned.gain_without_nodes,
        ),
        left_out=list(tuned.tried.best.left_out),
        ranks=[
            rank.with_step(rank.batch_size, tuned.tried.compute_s[rank.node]) for rank in tuned.tried.ranks
        ],
    )
    if not options.is_host_training or len(plan.ranks) == 1:
        return plan
    start_s = space.opening_s + prepared.again_s + measurer.start_s
    known = tuned.model, tuned.limits, errors, tuned.tried.result.error, start_s, measurer.start_s
    return StrategyChooser(options, context, plan, *known).choose()


"""Cuts are timed if FLOPs promise that they take less time by this share; less is within their error."""
"""Cuts whose parts are timed: those that FLOPs promise most of."""
SPLIT_TRIAL_S, MIN_SPLIT_STEPS, MAX_SPLIT_STEPS = 8.0, 4, 200


def check_possible(request: TuneOptions, context: RunContext) -> None:
    """Raise InputError if only one strategy is asked for, and job, model or fleet do not allow it."""
    info = context.prepared.model.info
    if request.strategy == FEATURES:
        find_features(context.prepared)
    elif request.strategy == SPLIT:
        check_split(context)
        if request.cut or not info.cuts:
            find_cut(info, request.cut)


@dataclass
class StrategyChooser:
    """Compares the strategies for one job with the plan `plan` for whole models."""

    request: TuneOptions
    """Its `strategy` and `cut` say what to compare; `check_possible` has accepted them."""
    context: RunContext
    plan: Plan
    model: FleetModel
    limits: Limits
    errors: ForecastErrors
    trial_error: float
    """The relative standard error of a step in the trial of `plan`."""
    start_s: float
    """Seconds of a training besides its epochs."""
    process_s: float
    """The part of `start_s` in which the ranks start, with their links."""
    impossible: dict[Strategy, str] = field(default_factory=dict)
    """Strategies that are not possible, and why."""

    def choose(self) -> Plan:
        """Return the plan with the strategy that takes the least time.

        Raises InputError when no batch sizes are possible.
        """
        if self.request.strategy == DATA_PARALLEL:
            return self.plan
        feature_layer = ""
        cuts: tuple[CutInfo, ...] = ()
        if self.request.strategy in (AUTO, FEATURES):
            feature_layer = self._find_feature_layer()
        if self.request.strategy in (AUTO, SPLIT):
            cuts = self._find_cuts()
        if not feature_layer and not cuts:
            return self._with_strategies(self.plan, [])
        try:
            times = self._time_parts(feature_layer, [cut.layer for cut in cuts])
        except CsdctlError as error:
            if self.request.strategy != AUTO:
                raise
            self.context.events.say(f"{error.message}: the strategies are not compared")
            self.impossible = {FEATURES: error.message, SPLIT: error.message, **self.impossible}
            return self._with_strategies(self.plan, [])
        if times.why_not:
            self.impossible[SPLIT] = times.why_not
        found = self._forecast(times, feature_layer, cuts)
        chosen = self._choose(found)
        if chosen.strategy == SPLIT:
            return self._try_split(chosen, found, times)
        return self._with_strategies(self._follow(chosen), found)

    def _find_feature_layer(self) -> str:
        try:
            return find_features(self.context.prepared).layer
        except InputError as error:
            self.impossible[FEATURES] = error.message
            return ""

    def _find_cuts(self) -> tuple[CutInfo, ...]:
        """Return the cuts to time: at most MAX_CUTS, of which FLOPs promise a gain."""
        info = self.context.prepared.model.info
        try:
            check_split(self.context)
            if self.request.cut or not info.cuts:
                return (find_cut(info, self.request.cut),)
        except InputError as error:
            self.impossible[SPLIT] = error.message
            return ()
        training = self._training
        whole = self._forecast_whole(training)
        promised = {}
        for cut in info.cuts:
            shares = share_by_flops(cut, info.num_operations)
            if shares and (found := training.forecast_split(shares, self.limits)):
                promised[cut.layer] = found.epoch_s
        cuts = sorted(
            (cut for cut in info.cuts if cut.layer in promised), key=lambda cut: promised[cut.layer]
        )
        if self.request.strategy == AUTO:
            cuts = [cut for cut in cuts if promised[cut.layer] < (1 - MIN_PROMISE) * whole.epoch_s]
        cuts = spread_cuts(cuts, info.num_operations)[:MAX_CUTS]
        if not cuts:
            self.impossible[SPLIT] = "no cut is expected to be faster, by FLOPs and bytes"
            if self.request.strategy == SPLIT:
                raise InputError(f"{info.name}: {self.impossible[SPLIT]}", remedy="name a cut: --cut LAYER")
        return tuple(cuts)

    @property
    def _training(self) -> Training:
        """The training with the machines of the plan, as they compute together."""
        model, num_ranks, prepared = self._model, len(self.plan.ranks), self.context.prepared
        known = model.machine_step_times()
        names = [rank.node for rank in self.plan.ranks if rank.node in known]
        times = {name: known[name].scaled(model.overhead_factor) for name in names}
        cost = model.collective_cost
        others = max(1, num_ranks - 1)
        return Training(
            times,
            lambda num_bytes: cost.at(num_bytes, num_ranks),
            # A sum moves each rank's vector to the host and the result back.
            (cost.per_byte_s + cost.per_rank_byte_s * others) / (2 * others),
            self.start_s,
            self.process_s,
            prepared.public.num_samples,
            prepared.num_private,
            prepared.validation.num_samples if prepared.validation else 0,
            prepared.recipe.epochs,
            self.context.job.is_repeating,
        )

    @property
    def _model(self) -> FleetModel:
        """The model of the fleet. A trial of a few samples on the host says nothing about many."""
        known = self.model.classes.get(HOST_NAME)
        if known is None or max(known.trial_sizes, default=MEASURED_BATCH) >= MEASURED_BATCH:
            return self.model
        return self.model.with_class(HOST_NAME, replace(known, in_step_factor=1.0))

    def _forecast_whole(self, training: Training) -> StrategyForecast:
        predicted = self.plan.predicted
        assert predicted is not None
        return training.forecast_data_parallel(
            {rank.node: rank.batch_size for rank in self.plan.ranks},
            {rank.node: rank.step_time_s or 0.0 for rank in self.plan.ranks},
            predicted.step_s * predicted.communication_share,
            self.model.vector_bytes,
        )

    def _time_parts(self, feature_layer: str, cuts: Sequence[str]) -> PartTimes:
        prepared, model = self.context.prepared, self.context.prepared.model
        prefix = None
        if feature_layer:
            prefix = as_prefix(self.context.compiler.parts(FLOAT32)[0])
        layers = tuple(dict.fromkeys([*([feature_layer] if feature_layer else []), *cuts]))
        self.context.events.say(f"timing parts of the model on the host: {', '.join(layers)}")
        host = self.plan.ranks[0]
        spec = PartsSpec(
            model.architecture.path,
            model.weights.path,
            prepared.recipe,
            host.runtime,
            prepared.public.element_spec,
            MEASURED_BATCH,
            layers,
            prefix,
            model.user_code,
        )
        space, doing = self.context.space, "timing the model's parts"
        return call_machine(space, HOST_NAME, prepared.worker, "parts", spec, PartTimes, doing=doing)

    def _forecast(
        self, times: PartTimes, feature_layer: str, cuts: Sequence[CutInfo]
    ) -> list[StrategyForecast]:
        """Return the forecasts of all strategies, whole models first."""
        training = replace(self._training, evaluation_share=times.evaluation_s / times.step_s)
        whole = self._forecast_whole(training)
        found = [whole]
        shares = measured_shares(times, self.context.prepared.model.info.cuts)
        if feature_layer:
            once = times.features_s / times.step_s
            share = once * max(1, self.context.prepared.recipe.views)
            of_frozen = shares.get(feature_layer) or Shares(feature_layer, once, 0.0, max(0.0, 1 - once))
            of_head = replace(of_frozen, vector_bytes=self.model.vector_bytes)
            by_features = training.forecast_features(whole, of_head, share)
            if num_bytes := bytes_for_host(self.context.job, self.context.prepared):
                by_features = training.forecast_on_host(by_features, of_head, num_bytes)
            found.append(by_features)
        for cut in cuts:
            measured = shares.get(cut.layer)
            if measured and (split := training.forecast_split(measured, self.limits)):
                found.append(split)
        of_steps = self.errors.after_trial(self.trial_error)
        return [add_range(one, of_steps) for one in found]

    def _choose(self, found: Sequence[StrategyForecast]) -> StrategyForecast:
        if self.request.strategy == AUTO:
            return choose_strategy(found)
        asked_for = [one for one in found if one.strategy == self.request.strategy]
        if not asked_for:
            raise InputError(
                self.impossible.get(SPLIT) or "no batch sizes for a split satisfy the limits",
                remedy="use other limits, or tune with another --strategy",
            )
        return min(asked_for, key=lambda one: one.first_run_s)

    def _follow(self, chosen: StrategyForecast) -> Plan:
        """Return the plan with the strategy and the batch sizes that were chosen."""
        if chosen.strategy != SPLIT:
            changed = {"strategy": chosen.strategy, "trains_on_host": chosen.trains_on_host}
            return self.plan.model_copy(update=changed)
        times = self._training.step_times
        by_name = {rank.node: rank for rank in self.plan.ranks}
        ranks = [
            by_name[name].with_step(size, times[name].at(size)) for name, size in chosen.batch_sizes.items()
        ]
        return self.plan.model_copy(update={"strategy": SPLIT, "cut": chosen.cut, "ranks": ranks})

    def _try_split(self, chosen: StrategyForecast, found: list[StrategyForecast], times: PartTimes) -> Plan:
        """Take steps with the split model. Return the plan of the strategy that then takes the least time."""
        plan = self._follow(chosen)
        shares = measured_shares(times, self.context.prepared.model.info.cuts)[chosen.cut]
        expected_s = self._training.split_step_s(chosen.batch_sizes, shares)
        num_steps = min(MAX_SPLIT_STEPS, max(MIN_SPLIT_STEPS, round(SPLIT_TRIAL_S / expected_s)))
        self.context.events.say(
            f"trying the split after {chosen.cut}: {num_steps} steps of all {len(plan.ranks)} ranks"
        )
        try:
            result, start_s = run_trial(plan.ranks, self.context, num_steps, cut=chosen.cut)
        except CsdctlError as error:
            if self.request.strategy == SPLIT:
                raise
            self.impossible[SPLIT] = f"the trial failed: {error.message}"
            rest = [one for one in found if one.strategy != SPLIT]
            return self._with_strategies(self._follow(choose_strategy(rest)), rest)
        ratio = result.step_s / expected_s
        self.context.events.say(
            f"a step takes {format_seconds(result.step_s)}, forecast {format_seconds(expected_s)}: "
            f"{result.samples_per_s:.1f} samples/s"
        )
        start_s += self.context.space.opening_s + self.context.prepared.again_s
        training = replace(self._training, start_s=start_s)
        of_steps = self.errors.after_trial(result.error)
        tried = add_range(training.correct(chosen, ratio).model_copy(update={"is_confirmed": True}), of_steps)
        rest = [one for one in found if one.strategy != SPLIT]
        cuts = [one for one in found if one.strategy == SPLIT and one is not chosen]
        others = [*rest, *(add_range(training.correct(one, ratio), of_steps) for one in cuts)]
        listed = sorted([*others, tried], key=lambda one: one.strategy != DATA_PARALLEL)
        final = tried if self.request.strategy == SPLIT else choose_strategy([*rest, tried])
        if final is not tried:
            return self._with_strategies(self._follow(final), listed)
        host = predict_host_samples_per_s(self.model, self.limits)
        predicted = confirmed_prediction(plan.ranks, result, self.errors, host_samples_per_s=host)
        peaks = zip(plan.ranks, result.peak_memory_bytes, strict=True)
        ranks = [rank.model_copy(update={"peak_memory_bytes": peak}) for rank, peak in peaks]
        plan = plan.model_copy(update={"predicted": predicted, "ranks": ranks})
        return self._with_strategies(plan, listed)

    def _with_strategies(self, plan: Plan, found: Sequence[StrategyForecast]) -> Plan:
        """Return `plan` with the forecasts, then the strategies that are not possible."""
        impossible = [StrategyPlan(strategy=name, why_not=why) for name, why in self.impossible.items()]
        return plan.model_copy(update={"strategies": [*found, *impossible]})
