"""`tune`: measure on the machines and save a plan, by the fit method or by Algorithm 1."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from csdctl.documents import check_fields
from csdctl.errors import InputError, NodeError, option
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.mpirun import find_mpirun
from csdctl.reporting.results import list_forecast_errors, read_results
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import MeasurementStore
from csdctl.tuning import stannis
from csdctl.tuning.measurements import ProbeOutcome
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT, Plan, RankPlan, save_plan
from csdctl.tuning.plan_choice import confirmed_prediction, predict_host_samples_per_s
from csdctl.tuning.search import Limits, default_limits
from csdctl.worker.protocol.orders import ProbeRequest
from csdctl.workflows.data.prepare import prepare_in
from csdctl.workflows.train.plan import build_fingerprint, default_runtime
from csdctl.workflows.train.request import AUTO, check_strategy
from csdctl.workflows.train.resolved import RunContext
from csdctl.workflows.tune import fleet_measurements, strategy_choice, tuning_run
from csdctl.workflows.tune.rounds import FitTuner, FleetMeasurer
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import open_workspace

TIME_TO_ACCURACY: Final = "time-to-accuracy"
FIT: Final = "fit"
STANNIS: Final = "stannis"
CONFIRM_DURATION_S = 3.0
"""The shortest time for which Algorithm 1's batch sizes are measured again."""


@dataclass(frozen=True)
class TuneOptions:
    """The method, the limits of a plan, and how to measure. Raises InputError for invalid values."""

    method: Literal["fit", "stannis"] = FIT
    """'fit', or 'stannis' for Algorithm 1."""
    limits: Limits = field(default_factory=Limits)
    is_fresh: bool = False
    """Ignore earlier measurements."""
    is_host_training: bool = True
    """False: the host only sums gradients and serves data to the nodes."""
    batch_sizes: tuple[int, ...] = stannis.DEFAULT_BATCH_SIZES
    """Algorithm 1's list."""
    step_divisor: float = stannis.DEFAULT_STEP_DIVISOR
    """Algorithm 1's C."""
    margin_scale: float = stannis.DEFAULT_MARGIN_SCALE
    """Algorithm 1's E."""
    probe_duration_s: float = 1.0
    """The shortest time of one measurement."""
    strategy: str = AUTO
    """The strategy: 'data-parallel', 'features' or 'split'. 'auto' compares all."""
    goal: Literal["throughput", "time-to-accuracy"] = "throughput"
    """The quantity that the plan maximizes: 'throughput', or with 'time-to-accuracy' progress per second."""
    cut: str = ""
    """With the strategy `split`: the only cut."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_strategy(self.strategy, self.cut)
        by_fit = f"{option('method')} {FIT}"
        if self.strategy in (FEATURES, SPLIT) and (self.method != FIT or not self.is_host_training):
            raise InputError(
                f"{option('strategy')} {self.strategy} needs {by_fit}, and a host that trains",
                remedy=f"leave out {option('method')} and {option('is_host_training=False')}, "
                "or the strategy",
            )
        if self.method != FIT and self.limits.given:
            problem = f"{self.method} takes no limits, received {', '.join(self.limits.given)}"
            raise InputError(problem, remedy=f"leave them out, or use {by_fit}")
        if self.goal == TIME_TO_ACCURACY and (self.method != FIT or self.limits.global_batch):
            raise InputError(
                f"{option('goal')} {TIME_TO_ACCURACY} chooses the global batch size, with {by_fit}",
                remedy=f"leave out {option('limits.global_batch')} and {option('method')}, "
                f"or {option('goal')}",
            )
        arguments = self.batch_sizes, self.step_divisor, self.margin_scale
        defaults = stannis.DEFAULT_BATCH_SIZES, stannis.DEFAULT_STEP_DIVISOR, stannis.DEFAULT_MARGIN_SCALE
        if self.method != STANNIS and arguments != defaults:
            raise InputError(
                f"{self.method} does not take {option('batch_sizes')}, {option('step_divisor')} and "
                f"{option('margin_scale')}",
                remedy=f"leave them out, or use {option('method')} {STANNIS}",
            )
        stannis.check_arguments(*arguments)
        if not 0 <= self.probe_duration_s < tuning_run.PROBE_DEADLINE_S:
            raise InputError(
                f"{option('probe_duration_s')} must be at least 0 and below {tuning_run.PROBE_DEADLINE_S:g}, "
                f"received {self.probe_duration_s}",
                remedy="see `csdctl tune --help`",
            )


def tune_job(job: Job, fleet: Fleet, directory: Path, options: TuneOptions, events: EventStream) -> Plan:
    """Prepare `job`, tune, and save the plan. Raises InputError, TuningError, NodeError and RunError."""
    if not fleet.host.trains:
        options = replace(options, is_host_training=False)
    if not options.is_host_training and (options.method == STANNIS or not fleet.nodes):
        raise InputError(f"a host that does not train needs at least one node, and {option('method')} {FIT}")
    noise_scale = None
    if options.goal == TIME_TO_ACCURACY:
        noise_scale = find_noise_scale(ProjectDirectory(directory), job.name)
    find_mpirun()  # probes and trials need linked ranks
    with open_workspace(directory, fleet, "tune", is_locking=True, say=events.say) as space:
        context = RunContext(job, prepare_in(space, job, events), space, events)
        strategy_choice.check_possible(options.strategy, options.cut, context)
        if options.method == STANNIS:
            plan = tune_by_algorithm_1(context, options)
        else:
            plan = tune_by_fit(context, options, noise_scale)
        plan = plan.model_copy(update={"made_for": build_fingerprint(plan, job, space.facts)})
        save_plan(space.project.plan(job.name), plan)
    return plan


def find_noise_scale(project: ProjectDirectory, job: str) -> float:
    """Return the noise scale, in samples, of the latest run of `job` that knows it. Raises InputError."""
    for run_id in reversed(project.run_ids()):
        with suppress(InputError):  # a foreign or damaged directory
            run = project.find_run(run_id)
            if run.read_manifest().plan.job == job and (scale := read_results(run).summary.noise_scale):
                return scale
    problem = f"no run of {job} has a gradient noise scale, which needs two ranks that train"
    raise InputError(problem, remedy="train first, such as `csdctl train --max-steps 100`, then tune again")


def tune_by_fit(context: RunContext, options: TuneOptions, noise_scale: float | None = None) -> Plan:
    """Return the best plan within `options.limits`, by goodput with a `noise_scale` in samples."""
    job, prepared, space, say = context.job, context.prepared, context.space, context.events.say
    private = prepared.num_private
    num_samples = prepared.public.num_samples + sum(private.values())
    limits = default_limits(options.limits, job.recipe.reference_batch, num_samples, 1 + len(private))
    measurements = fleet_measurements.FleetMeasurements(
        prepared.model.describe(),
        fleet_measurements.hash_recipe(job, prepared.public),
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
    )
    ranks = [rank.with_step(rank.batch_size, tried.compute_s[rank.node]) for rank in tried.ranks]
    plan = build_plan(context, measurer, ranks, FIT, {**tuned.limits.given})
    plan = plan.model_copy(update={"predicted": predicted, "left_out": list(tried.best.left_out)})
    if not options.is_host_training or len(plan.ranks) == 1 or options.strategy == DATA_PARALLEL:
        return plan
    return strategy_choice.StrategyChooser(
        options.strategy, options.cut, context, plan, tuned=tuned, errors=errors, process_s=measurer.start_s
    ).choose()


def tune_by_algorithm_1(context: RunContext, options: TuneOptions) -> Plan:
    """Return the plan of Algorithm 1. Raises TuningError, NodeError, and what probes raise."""
    fleet, facts = context.space.fleet, context.space.facts
    with FleetMeasurer(context) as measurer:

        def measure(sizes: Mapping[str, int], duration_s: float) -> dict[str, ProbeOutcome]:
            requests = {name: ProbeRequest(size, min_duration_s=duration_s) for name, size in sizes.items()}
            return measurer.measure(requests)

        def step_times(sizes: Mapping[str, int]) -> dict[str, float | None]:
            outcomes = measure(sizes, options.probe_duration_s)
            return {name: outcome.step_time_s for name, outcome in outcomes.items()}

        tuned = stannis.tune_stannis(
            fleet.machines,
            step_times,
            batch_sizes=options.batch_sizes,
            step_divisor=options.step_divisor,
            margin_scale=options.margin_scale,
        )
        # Again, for longer: a run's efficiency is computed from the throughput of each rank by itself.
        context.events.say("confirming the chosen batch sizes")
        sizes = {name: point.batch_size for name, point in tuned.items()}
        ranks = []
        for name, outcome in measure(sizes, CONFIRM_DURATION_S).items():
            if outcome.step_time_s is None:
                raise NodeError(
                    f"batch size {outcome.batch_size} fitted in memory at first, "
                    "but not when it was confirmed",
                    node=name,
                    remedy=f"check what else uses its memory, or use smaller {option('batch_sizes')}",
                )
            rank = RankPlan.with_runtime(
                default_runtime(name, fleet, facts),
                node=name,
                batch_size=0,
                peak_memory_bytes=outcome.peak_memory_bytes or None,
            )
            ranks.append(rank.with_step(outcome.batch_size, outcome.step_time_s))
    arguments: dict[str, float | list[int]] = {
        "batch_sizes": [*options.batch_sizes],
        "C": options.step_divisor,
        "E": options.margin_scale,
    }
    return build_plan(context, measurer, ranks, STANNIS, arguments)


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
