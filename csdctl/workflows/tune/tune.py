"""`tune`: measure on the machines and save a plan, by the fit method or by Algorithm 1."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from csdctl.errors import InputError, NodeError, option
from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.launch.mpirun import find_mpirun
from csdctl.reporting.results import read_results
from csdctl.runs.directory import ProjectDirectory
from csdctl.tuning.measurements import ProbeOutcome
from csdctl.tuning.plan import Plan, RankPlan, save_plan
from csdctl.tuning.stannis import tune_stannis
from csdctl.worker.protocol.probe import ProbeRequest
from csdctl.workflows.data.prepare import prepare_in
from csdctl.workflows.train.plan import build_fingerprint, default_runtime
from csdctl.workflows.train.spec import RunContext
from csdctl.workflows.tune.request import BY_FIT, STANNIS, TIME_TO_ACCURACY, TuneOptions
from csdctl.workflows.tune.rounds import FleetMeasurer, build_plan, tune_by_fit
from csdctl.workflows.tune.strategy_choice import check_possible
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import open_workspace

CONFIRM_DURATION_S = 3.0
"""The shortest time for which Algorithm 1's batch sizes are measured again."""


def tune_job(job: Job, fleet: Fleet, directory: Path, options: TuneOptions, events: EventStream) -> Plan:
    """Prepare `job`, tune, and save the plan in the project of `directory`.

    Raises InputError, TuningError, NodeError, and what opening, preparing, probes and a trial raise.
    """
    if not fleet.host.trains:
        options = replace(options, is_host_training=False)
    if not options.is_host_training and (options.method == STANNIS or not fleet.nodes):
        raise InputError(f"a host that does not train needs at least one node, and {BY_FIT}")
    noise_scale = None
    if options.goal == TIME_TO_ACCURACY:
        noise_scale = find_noise_scale(ProjectDirectory(directory), job.name)
    find_mpirun()  # probes and trials need linked ranks
    with open_workspace(directory, fleet, "tune", is_locking=True, say=events.say) as space:
        context = RunContext(job, prepare_in(space, job, events), space, events)
        check_possible(options.strategy, options.cut, context)
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
            if run.read_manifest().plan.job == job and (scale := read_results(run).summary.noise_scale):
                return scale
    raise InputError(
        f"no run of {job} has a gradient noise scale, which needs two ranks that train",
        remedy="train first, such as `csdctl train --max-steps 100`, then tune again",
    )


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

        tuned = tune_stannis(
            fleet.machines,
            step_times,
            batch_sizes=options.batch_sizes,
            step_divisor=options.step_divisor,
            margin_scale=options.margin_scale,
        )
        # Again, for longer: a run's efficiency is computed from what the ranks reach alone.
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
            rank = RankPlan(
                node=name,
                batch_size=0,
                peak_memory_bytes=outcome.peak_memory_bytes or None,
                **asdict(default_runtime(name, fleet, facts)),
            )
            ranks.append(rank.with_step(outcome.batch_size, outcome.step_time_s))
    arguments: dict[str, float | list[int]] = {
        "batch_sizes": [*options.batch_sizes],
        "C": options.step_divisor,
        "E": options.margin_scale,
    }
    return build_plan(context, measurer, ranks, STANNIS, arguments)
