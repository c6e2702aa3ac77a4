"""`tune`: measure on the machines and save a plan, by Algorithm 1 or by the fit method."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from csdctl.errors import InputError, NodeError
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.mpirun import find_mpirun
from csdctl.notify import Say
from csdctl.runs.measurements import open_measurements
from csdctl.tuning.measurements import describe_model
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from csdctl.tuning.plan_choice import confirmed_prediction, measured_ranks
from csdctl.tuning.search import default_limits
from csdctl.tuning.stannis import TunedBatch, tune_stannis
from csdctl.worker.protocol.probe import ProbeRequest
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.data.deploy import common_files, deploy_files
from csdctl.workflows.data.prepare import PreparationObserver, Prepared, prepare_in
from csdctl.workflows.train.plan import build_fingerprint, default_runtime
from csdctl.workflows.tune.fit_tuning import FitTuner
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements, hash_recipe
from csdctl.workflows.tune.options import FIT, STANNIS, TuneOptions
from csdctl.workflows.tune.probing import FleetMeasurer, TuneWatch
from csdctl.workflows.tune.strategies import StrategyChooser, check_possible
from csdctl.workflows.workspace.workspace import Workspace, open_workspace

CONFIRM_DURATION_S = 3.0


def tune_by_algorithm_1(
    job: Job, prepared: Prepared, space: Workspace, options: TuneOptions, say: Say, watch: TuneWatch
) -> Plan:
    """Return the plan of Algorithm 1; raises TuningError, NodeError, and what probes raise."""
    machines = space.fleet.machines
    runtimes = {name: default_runtime(name, space.fleet, space.facts) for name in machines}
    with FleetMeasurer(job, prepared, space, runtimes, watch, say) as rounds:

        def step_times(sizes: Mapping[str, int], duration_s: float) -> dict[str, float | None]:
            requests = {name: ProbeRequest(size, min_duration_s=duration_s) for name, size in sizes.items()}
            results = rounds.measure(requests)
            return {name: result.step_time_s if result else None for name, result in results.items()}

        tuned = tune_stannis(
            machines,
            lambda sizes: step_times(sizes, options.probe_duration_s),
            batch_sizes=options.batch_sizes,
            step_divisor=options.step_divisor,
            margin_scale=options.margin_scale,
        )
        # Again, for longer: a run's efficiency is computed from what the ranks reach alone.
        say("confirming the chosen batch sizes")
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
            f"batch size {tuned.batch_size} fitted in memory at first, but no longer when it was confirmed",
            node=name,
            remedy="check what else uses that machine's memory, or give smaller --batch-sizes",
        )
    size = tuned.batch_size
    rank = RankPlan(node=name, batch_size=size, threads=runtime.threads, peak_memory_bytes=peaks.get(size))
    return rank.with_step(size, step_time_s)


class TuneObserver(PreparationObserver, Protocol):
    """Shows one `csdctl tune`."""

    def measuring(self, machines: Sequence[str], /) -> AbstractContextManager[TuneWatch]:
        """Open a view of what the machines do; lines of text may be shown meanwhile."""


@dataclass(frozen=True)
class SavedPlan:
    """A plan and its file."""

    plan: Plan
    path: Path


def tune_job(
    job: Job, fleet: Fleet, directory: Path, options: TuneOptions, observer: TuneObserver
) -> SavedPlan:
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
            plan = tune(job, prepared, space, options, observer.say, watch)
        path = space.project.plan(job.name)
        save_plan(path, plan)
    return SavedPlan(plan, path)


def tune(
    job: Job, prepared: Prepared, space: Workspace, options: TuneOptions, say: Say, watch: TuneWatch
) -> Plan:
    """Return a plan for `job`; raises InputError, DeadlineError, NodeError, and what a trial raises."""
    if not options.is_host_training and (options.method == STANNIS or not space.fleet.nodes):
        raise InputError("--no-host needs at least one node, and --method fit")
    check_possible(options, job, prepared)
    tune_by_method = tune_by_algorithm_1 if options.method == STANNIS else tune_by_fit
    plan = tune_by_method(job, prepared, space, options, say, watch)
    return plan.model_copy(update={"made_for": build_fingerprint(plan, job, space.facts)})


def tune_by_fit(
    job: Job, prepared: Prepared, space: Workspace, options: TuneOptions, say: Say, watch: TuneWatch
) -> Plan:
    """Return the plan with the highest throughput within `options.limits`.

    Raises TuningError when no plan is possible, and what probes and a trial's ranks raise.
    """
    num_public, private = prepared.public.num_samples, prepared.num_private
    num_samples = num_public + sum(private.values())
    limits = default_limits(options.limits, job.recipe.reference_batch, num_samples, 1 + len(private))
    with open_measurements(space.project.measurements, say, is_optional=True) as store:
        measurements = FleetMeasurements(
            describe_model(prepared.model.info, prepared.model.architecture.sha256),
            hash_recipe(job, prepared.public),
            space.fleet,
            space.facts,
            store,
            is_fresh=options.is_fresh,
            is_host_training=options.is_host_training,
        )
        model = measurements.recall_fleet(required=list(private))
        model = replace(model, max_host_share=num_public / (num_samples or 1))
        runtimes = {name: model.class_of(name).settings for name in model.machines}
        with FleetMeasurer(job, prepared, space, runtimes, watch, say) as measurer:
            tuner = FitTuner(
                measurer, measurements, limits, say, options.is_exploring, options.probe_duration_s
            )
            tuned = tuner.tune(model)
    plan = Plan(
        job=job.name,
        job_fingerprint=job.fingerprint(),
        method=FIT,
        emulated=space.fleet.emulated,
        method_arguments={**limits.given},
        num_probes=measurer.num_probes,
        measuring_s=round(measurer.measuring_s, 2),
        predicted=confirmed_prediction(tuned.tried.ranks, tuned.tried.result, tuned.gain),
        left_out=list(tuned.tried.best.left_out),
        ranks=measured_ranks(tuned.tried),
    )
    if not options.is_host_training or len(plan.ranks) == 1:
        return plan
    start_s = space.opening_s + prepared.again_s + measurer.start_s + tuned.tried.result.fixed_s
    return StrategyChooser(
        options,
        job,
        prepared,
        space,
        plan,
        tuned.model,
        limits,
        start_s,
        measurer.start_s,
        say,
        watch,
    ).choose()
