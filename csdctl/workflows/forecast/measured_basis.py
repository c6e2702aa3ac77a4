"""The basis of a forecast from the history, and from the plan for the fleet as it is."""

from collections.abc import Sequence

from csdctl.fleet.model import Fleet
from csdctl.job.model import Job
from csdctl.perfmodel.collective import CollectiveCost
from csdctl.tuning.collective_fit import fit_collective
from csdctl.tuning.limits import default_limits, read_limits
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.plan import Plan
from csdctl.tuning.scaling_curve import Choice, Costs, calibrate_stretch, choose_best, size_ranks
from csdctl.tuning.search import Limits
from csdctl.workflows.forecast.basis import EMULATED, NO_POWER, NO_SUM, ForecastBasis
from csdctl.workflows.forecast.recall import Recalled
from csdctl.workflows.train.plan_validation import find_left_out


def history_basis(
    job: Job,
    fleet: Fleet,
    plan: Plan | None,
    known: Recalled,
    num_samples: int | None,
    max_global_batch: int | None = None,
) -> ForecastBasis:
    """Batch sizes of `plan` for the fleet as it is, the best for other numbers of nodes.

    `num_samples` of an epoch, None: not known. `max_global_batch` without a plan; None: as `tune` by itself.
    Raises TuningError when the limits allow no plan.
    """
    given = read_limits(plan.method_arguments) if plan else Limits(max_global_batch)
    choice = _choose_as_tuned(job, fleet, plan, num_samples, given)
    sum_cost = fit_collective(known.sums)
    stretch, in_step = _stretch(plan, known, sum_cost)
    if plan:
        sizes = {rank.node: rank.batch_size for rank in plan.ranks}
    else:
        costs = Costs(sum_cost, known.vector_bytes, stretch)
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
            "batch_sizes": _say_choice(choice, len(nodes)),
            "sum": _say_sums(known.sums),
            "in_step": in_step,
            "power": NO_POWER,
        },
        gradient_bytes=known.vector_bytes,
        stretch=stretch,
        epochs=job.recipe.epochs,
        choice=choice,
    )


def _choose_as_tuned(
    job: Job, fleet: Fleet, plan: Plan | None, num_samples: int | None, given: Limits
) -> Choice:
    """Within the limits `given`, and where they leave it open those that `tune` keeps to by itself."""
    is_required = job.private_path is not None

    def limits(num_nodes: int) -> Limits:
        num_required = 1 + num_nodes if is_required else 1
        return default_limits(given, job.recipe.reference_batch, num_samples, num_required)

    if plan is None:
        return Choice(limits, is_required)
    idle = {rank.node for rank in plan.ranks if not rank.batch_size} | {*find_left_out(plan, fleet)}
    return Choice(limits, is_required, is_planned=True, idle=frozenset(idle))


def _stretch(plan: Plan | None, known: Recalled, sum_cost: CollectiveCost) -> tuple[float, str]:
    """What being in step costs beyond the slowest rank and the sum, and where that comes from."""
    tried = known.trial
    shown_by = "the newest trial of this model on such a fleet"
    if plan and (prediction := plan.prediction):
        steps = {rank.node: rank.step_time for rank in (known.host, *known.nodes)}
        tried = [(steps[rank.node], rank.batch_size) for rank in plan.ranks], prediction.step_s
        shown_by = "the plan's trial"
    if tried is None:
        return 1.0, "nothing was tried together: counted as nothing"
    ranks, step_s = tried
    stretch = calibrate_stretch(ranks, step_s, sum_cost.at(known.vector_bytes, len(ranks)))
    return stretch, f"steps together take {stretch:.2f} times the slowest rank's alone, by {shown_by}"


def _say_choice(choice: Choice, num_nodes: int) -> str:
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


def _say_sums(sums: Sequence[CollectiveMeasurement]) -> str:
    if not sums:
        return NO_SUM
    ranks = [one.num_ranks for one in sums]
    counts = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"
    return f"measured: a line through {len(sums)} sums over {counts} ranks on such a fleet"
