"""`tune`: measures on the machines themselves and writes a plan, by Algorithm 1 or by our own fit."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from csdctl.errors import InputError, NodeError
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.tuning.search import Limits
from csdctl.tuning.stannis import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_MARGIN_SCALE,
    DEFAULT_STEP_DIVISOR,
    TunedBatch,
    check_arguments,
    tune_stannis,
)
from csdctl.worker.protocol.probe import ProbeRequest
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.plan_choice import default_runtime
from csdctl.workflows.train.plan_validation import describe_made_for
from csdctl.workflows.tune.probing import PROBE_DEADLINE_S, OnProbes, ProbeRounds
from csdctl.workflows.workspace.workspace import Workspace

CONFIRM_DURATION_S = 3.0
TUNING_HELP = "see `csdctl tune --help`"
FIT, STANNIS = "fit", "stannis"
METHODS = (FIT, STANNIS)


@dataclass(frozen=True)
class TuneOptions:
    """What a user may change: the method, what plans must keep to, and how it measures."""

    method: str = FIT
    limits: Limits = field(default_factory=Limits)
    is_fresh: bool = False
    """Nothing that was measured before counts."""
    is_exploring: bool = True
    """Other runtime settings are probed too."""
    is_host_training: bool = True
    """Else it sits out: it adds up and serves the others."""
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    step_divisor: float = DEFAULT_STEP_DIVISOR
    margin_scale: float = DEFAULT_MARGIN_SCALE
    """Algorithm 1's list, C and E."""
    probe_duration_s: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"there is no method {self.method!r}", remedy=f"one of {', '.join(METHODS)}")
        if self.method != FIT and self.limits.given:
            raise InputError(
                f"{self.method} knows no limits, received {', '.join(self.limits.given)}",
                remedy=f"leave them out, or take --method {FIT}",
            )
        of_paper = self.batch_sizes, self.step_divisor, self.margin_scale
        if self.method != STANNIS and of_paper != (
            DEFAULT_BATCH_SIZES,
            DEFAULT_STEP_DIVISOR,
            DEFAULT_MARGIN_SCALE,
        ):
            raise InputError(
                f"{self.method} knows no --batch-sizes, -C and -E",
                remedy=f"leave them out, or take --method {STANNIS}",
            )
        check_arguments(*of_paper)
        if not 0 <= self.probe_duration_s < PROBE_DEADLINE_S:
            raise InputError(
                f"--probe-seconds must be at least 0 and below {PROBE_DEADLINE_S:g}, "
                f"received {self.probe_duration_s}",
                remedy=TUNING_HELP,
            )


def tune(
    job: Job, prepared: Prepared, space: Workspace, options: TuneOptions, say: Say, on_probes: OnProbes
) -> Plan:
    """A plan for `job`; raises InputError, DeadlineError, NodeError, and what a trial's ranks raise."""
    if not options.is_host_training and (options.method == STANNIS or not space.fleet.nodes):
        raise InputError("a host that sits out needs nodes that train, and the method fit")
    if options.method == STANNIS:
        plan = _tune_by_algorithm_1(job, prepared, space, options, say, on_probes)
    else:
        from csdctl.workflows.tune.fit import tune_by_fit

        plan = tune_by_fit(job, prepared, space, options, say, on_probes)
    # Whoever edits the batch sizes later is not told what was predicted for these.
    predicted = plan.predicted and plan.predicted.model_copy(update={"batch_sizes": plan.batch_sizes})
    made_for = describe_made_for(plan, job, space.facts)
    return plan.model_copy(update={"made_for": made_for, "predicted": predicted})


def _tune_by_algorithm_1(
    job: Job, prepared: Prepared, space: Workspace, options: TuneOptions, say: Say, on_probes: OnProbes
) -> Plan:
    machines = space.fleet.machines
    runtimes = {name: default_runtime(name, space.fleet, space.facts) for name in machines}
    with ProbeRounds(job, prepared, space, runtimes, on_probes, say) as rounds:

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
        # Once more, for longer: what the ranks reach alone is what a run's efficiency is held against.
        say("confirming the chosen batch sizes")
        confirmed = step_times({name: one.batch_size for name, one in tuned.items()}, CONFIRM_DURATION_S)
        ranks = []
        for name, one in tuned.items():
            step_time_s = confirmed[name]
            if step_time_s is None:
                raise NodeError(
                    f"batch size {one.batch_size} fitted in memory once and then no longer",
                    node=name,
                    remedy="look what else uses that machine's memory, or give smaller --batch-sizes",
                )
            peak = rounds.probers[name].peaks.get(one.batch_size)
            ranks.append(_rank_plan(name, one, step_time_s, runtimes[name], peak))
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
    name: str, tuned: TunedBatch, step_time_s: float, runtime: Runtime, peak_bytes: int | None
) -> RankPlan:
    return RankPlan(
        node=name,
        batch_size=tuned.batch_size,
        threads=runtime.threads,
        step_time_s=round(step_time_s, 6),
        samples_per_s=round(tuned.batch_size / step_time_s, 2),
        peak_memory_bytes=peak_bytes,
    )
