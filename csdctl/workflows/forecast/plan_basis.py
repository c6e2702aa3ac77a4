"""The basis of a forecast from a plan alone: the batch sizes and speeds of its ranks."""

from csdctl.errors import InputError
from csdctl.job.model import Job
from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.prediction import RankModel
from csdctl.perfmodel.scaling import PlannedRank
from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.plan import Plan, RankPlan
from csdctl.workflows.forecast.basis import EMULATED, NO_POWER, NO_SUM, ForecastBasis
from csdctl.workflows.train.plan import RETUNE


def plan_basis(job: Job, plan: Plan) -> ForecastBasis:
    """Return the batch sizes and speeds of the plan; raises InputError when they were not measured."""
    if not plan.ranks[0].batch_size:
        raise InputError(
            "the host does not train in the plan: its speed alone, the baseline, is unknown",
            remedy="run `csdctl tune` again without --no-host",
        )
    host, *nodes = [_planned_rank(plan, rank) for rank in plan.ranks]
    measured = f"measured by `csdctl tune`, {plan.num_probes} probes"
    sum_cost, sum_origin = CollectiveCost(), NO_SUM
    if nodes and (prediction := plan.prediction):
        communication_s = max(0.0, prediction.step_s - max(rank.step_s for rank in (host, *nodes)))
        sum_cost = CollectiveCost(per_rank_s=communication_s / len(nodes))
        sum_origin = (
            f"{communication_s * 1000:.1f} ms with {len(nodes)} nodes, by the plan; "
            "assumption: proportional to the number of nodes"
        )
    return ForecastBasis(
        title=plan.job,
        source="emulated" if plan.emulated else "measured",
        host=host,
        nodes=tuple(nodes),
        num_nodes=len(nodes),
        sum_cost=sum_cost,
        origins={
            "speeds": (EMULATED if plan.emulated else "") + measured,
            "batch_sizes": "those of the plan, for any number of nodes",
            "sum": sum_origin,
            "power": NO_POWER,
        },
        epochs=job.recipe.epochs,
    )


def _planned_rank(plan: Plan, rank: RankPlan) -> PlannedRank:
    if rank.step_time_s is None:
        raise InputError(f"the plan of {plan.job} has no step time for {rank.node}", remedy=RETUNE)
    # The user may have edited the batch size; the step time is that of the measured size. The machine is
    # assumed to reach the same samples/s at any size.
    measured_size = round((rank.samples_per_s or 0) * rank.step_time_s) or rank.batch_size
    step_time = StepTime(0.0, rank.step_time_s / measured_size)
    return PlannedRank(RankModel(rank.node, step_time), rank.batch_size)
