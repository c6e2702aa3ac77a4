"""The basis of a forecast from stored measurements, with the plan for the fleet as it is."""

from collections.abc import Sequence

from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.perfmodel.collective import CollectiveCost
from csdctl.tuning.collective_fit import fit_collective
from csdctl.tuning.limits import default_limits, read_limits
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.plan import Plan
from csdctl.tuning.scaling_curve import Choice, Costs, calibrate_overhead, choose_best, size_ranks
from csdctl.tuning.search import Limits
from csdctl.workflows.forecast.basis import EMULATED, NO_POWER, NO_SUM, ForecastBasis
from csdctl.workflows.forecast.recall import Recalled
from csdctl.workflows.train.plan import find_left_out


def measured_basis(
    job: Job,
    fleet: Fleet,
    plan: Plan | None,
    known: Recalled,
    num_samples: int | None,
    max_global_batch: int | None = None,
) -> ForecastBasis:
    """Return a basis with the plan's batch sizes for the fleet as it is, and the best for other sizes.

    `num_samples` of an epoch, None: unknown. `max_global_batch` applies without a plan; None: the default
    of `tune`. Raises TuningError when the limits allow no plan.
    """
    given = read_limits(plan.method_arguments) if plan else Limits(max_global_batch)
    choice = _choice_of_tune(job, fleet, plan, num_samples, given)
    sum_cost = fit_collective(known.sums)
    overhead_factor, in_step = _overhead_factor(plan, known, sum_cost)
    if plan:
        sizes = {rank.node: rank.batch_size for rank in plan.ranks}
    else:
        costs = Costs(sum_cost, known.vector_bytes, overhead_factor)
        sizes = choose_best(known.host, known.nodes, len(known.nodes), choice, costs).batch_sizes
    host, *nodes = size_ranks((known.host, *known.nodes), sizes)
    return ForecastBasis(
        title=job.name,
        source="emulated" if fleet.emulated else "guessed" if known.is_guessed else "measured",
        host=host,
        nodes=tuple(nodes),
        num_nodes=len(nodes),
        sum_cost=sum_cost,
        origins={
            "speeds": (EMULATED if fleet.emulated else "") + known.speeds,
            "batch_sizes": _describe_choice(choice, len(nodes)),
            "sum": _describe_sums(known.sums),
            "in_step": in_step,
            "power": NO_POWER,
        },
        gradient_bytes=known.vector_bytes,
        overhead_factor=overhead_factor,
        epochs=job.recipe.epochs,
        choice=choice,
    )


def _choice_of_tune(
    job: Job, fleet: Fleet, plan: Plan | None, num_samples: int | None, given: Limits
) -> Choice:
    """Return how `tune` would choose: within the limits `given`, and its default limits otherwise."""
    is_required = job.private_path is not None

    def limits(num_nodes: int) -> Limits:
        num_required = 1 + num_nodes if is_required else 1
        return default_limits(given, job.recipe.reference_batch, num_samples, num_required)

    if plan is None:
        return Choice(limits, is_required)
    idle = {rank.node for rank in plan.ranks if not rank.batch_size} | {*find_left_out(plan, fleet)}
    return Choice(limits, is_required, is_planned=True, idle=frozenset(idle))


def _overhead_factor(plan: Plan | None, known: Recalled, sum_cost: CollectiveCost) -> tuple[float, str]:
    """Return the ratio of a step without the sum to the slowest rank's step alone, and its origin."""
    tried = known.trial
    source = "the newest trial of this model on such a fleet"
    if plan and (prediction := plan.prediction):
        step_times = {rank.node: rank.step_time for rank in (known.host, *known.nodes)}
        tried = [(step_times[rank.node], rank.batch_size) for rank in plan.ranks], prediction.step_s
        source = "the plan's trial"
    if tried is None:
        return 1.0, "no trial of all ranks: no overhead is counted"
    ranks, step_s = tried
    factor = calibrate_overhead(ranks, step_s, sum_cost.at(known.vector_bytes, len(ranks)))
    return (
        factor,
        f"a step of all ranks takes {factor:.2f} times as long as the slowest rank alone, by {source}",
    )


def _describe_choice(choice: Choice, num_nodes: int) -> str:
    limits = choice.limits(num_nodes)
    within = []
    if limits.global_batch:
        within.append(f"a global batch of {limits.global_batch:,}")
    elif limits.max_global_batch:
        within.append(f"a global batch of at most {limits.max_global_batch:,}")
    if limits.max_step_s:
        within.append(f"steps of at most {limits.max_step_s:g} s")
    best = f"the best with {' and '.join(within)}"
    if choice.is_planned:
        return f"for {num_nodes} nodes those of the plan, for others {best}"
    return f"for each number of nodes {best}"


def _describe_sums(sums: Sequence[CollectiveMeasurement]) -> str:
    if not sums:
        return NO_SUM
    ranks = [measurement.num_ranks for measurement in sums]
    counts = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
    return f"measured: a line fitted to {len(sums)} sums over {counts} ranks on such a fleet"
