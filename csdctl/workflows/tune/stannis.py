"""Algorithm 1 of the STANNIS paper, measured on the machines."""

from collections.abc import Mapping

from csdctl.errors import NodeError
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.tuning.stannis import TunedBatch, tune_stannis
from csdctl.worker.protocol.probe import ProbeRequest
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.plan import default_runtime
from csdctl.workflows.tune.options import STANNIS, TuneOptions
from csdctl.workflows.tune.probing import ProbeRounds
from csdctl.workflows.tune.watch import TuneWatch
from csdctl.workflows.workspace.workspace import Workspace

CONFIRM_DURATION_S = 3.0


def tune_by_algorithm_1(
    job: Job, prepared: Prepared, space: Workspace, options: TuneOptions, say: Say, watch: TuneWatch
) -> Plan:
    """Return the plan of Algorithm 1; raises TuningError, NodeError, and what probes raise."""
    machines = space.fleet.machines
    runtimes = {name: default_runtime(name, space.fleet, space.facts) for name in machines}
    with ProbeRounds(job, prepared, space, runtimes, watch, say) as rounds:

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
    return RankPlan(
        node=name,
        batch_size=tuned.batch_size,
        threads=runtime.threads,
        step_time_s=round(step_time_s, 6),
        samples_per_s=round(tuned.batch_size / step_time_s, 2),
        peak_memory_bytes=peaks.get(tuned.batch_size),
    )
