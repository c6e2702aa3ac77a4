"""The best plan for a modelled fleet, and the ranks of the plan file; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import RankModel, StepTime, predict
from csdctl.tuning.fleet_model import FleetModel, TrialResult, TriedPlan
from csdctl.tuning.plan import Predicted, RankPlan
from csdctl.tuning.search import BestPlan, Limits, best_equal, find_best, find_best_ranks


def choose_plan(
    model: FleetModel, limits: Limits, step_times: Mapping[str, StepTime] | None = None
) -> BestPlan:
    """Return the plan with the most samples/s; `step_times` by class, None: those of `model`.

    Raises TuningError when no plan satisfies the limits.
    """
    candidates = list_candidates(model, step_times)
    if not model.is_host_training:
        return find_best(candidates, limits, model.sum_s_of_training, model.overhead_factor)
    best = find_best_ranks(
        candidates[0], candidates[1:], limits, model.sum_s_of_training, model.overhead_factor
    )
    host_size = best.batch_sizes.get(HOST_NAME, 0)
    if host_size <= model.max_host_share * sum(best.batch_sizes.values()):
        return best
    return _limit_host(model, limits, candidates)


def _limit_host(model: FleetModel, limits: Limits, candidates: Sequence[RankModel]) -> BestPlan:
    """Return the best plan in which the host has no more than its share of the samples, maybe none."""
    host, *nodes = candidates
    share = model.max_host_share
    host_limit = int(share * limits.largest_global_batch)
    best = find_best(
        nodes,
        limits.without(host_limit),
        lambda num_nodes: model.sum_s(num_nodes + 1),
        model.overhead_factor,
    )
    size = min(host_limit, int(share / (1 - share) * sum(best.batch_sizes.values())))
    if limits.global_batch:
        size = host_limit
    if not size:
        return best
    sizes = {host.node: size, **best.batch_sizes}
    members = [one for one in candidates if one.node in sizes]
    prediction = predict(members, [*sizes.values()], model.sum_s(len(sizes)), model.overhead_factor)
    return BestPlan(sizes, prediction, best.left_out)


def choose_class_sizes(
    model: FleetModel, limits: Limits, step_times: Mapping[str, StepTime]
) -> dict[str, int]:
    """Return the largest batch size of each class in the best plan, without classes that are left out."""
    chosen = choose_plan(model, limits, step_times).batch_sizes
    return {
        name: max(chosen[machine] for machine in training)
        for name, known in model.classes.items()
        if (training := [machine for machine in known.machines if machine in chosen])
    }


def list_candidates(model: FleetModel, step_times: Mapping[str, StepTime] | None = None) -> list[RankModel]:
    """Return the machines that may train, in the order of the fleet."""
    return [
        RankModel(machine, step_time, is_required=machine in model.required)
        for machine, step_time in model.machine_step_times(step_times).items()
    ]


def predict_samples_per_s(model: FleetModel, batch_sizes: Mapping[str, int]) -> float:
    """Predict the samples/s of a plan with these batch sizes, by machine in the order of the fleet."""
    members = [member for member in list_candidates(model) if member.node in batch_sizes]
    sum_s = model.sum_s(len(members) + (HOST_NAME not in batch_sizes))
    return predict(members, [*batch_sizes.values()], sum_s, model.overhead_factor).samples_per_s


def choose_equal_plan(model: FleetModel, limits: Limits) -> BestPlan | None:
    """Return the fastest plan with the same batch size on every machine; None: there is no such plan."""
    if model.max_host_share < 1 / len(model.machines):
        return None  # the host has too few samples for an equal batch
    return best_equal(list_candidates(model), limits, model.sum_s_of_training, model.overhead_factor)


def plan_ranks(model: FleetModel, best: BestPlan) -> tuple[RankPlan, ...]:
    """Return the ranks of the plan file, the host first, with batch size 0 when it does not train."""
    step_times = model.machine_step_times()
    ranks = tuple(_plan_rank(model, name, size, step_times[name]) for name, size in best.batch_sizes.items())
    if HOST_NAME in best.batch_sizes:
        return ranks
    return (RankPlan(node=HOST_NAME, batch_size=0, threads=1), *ranks)


def _plan_rank(model: FleetModel, machine: str, batch_size: int, step_time: StepTime) -> RankPlan:
    known = model.class_of(machine)
    at_once = known.max_at_once
    rank = RankPlan(
        node=machine,
        batch_size=batch_size,
        **asdict(known.settings),
        # Set even when this batch fits, because it may grow during a run.
        micro_batch_size=at_once if at_once is not None and at_once < 2 * batch_size else None,
        peak_memory_bytes=known.predict_peak_bytes(batch_size),
    )
    return rank.with_step(batch_size, step_time.at(batch_size))


def measured_ranks(tried: TriedPlan) -> list[RankPlan]:
    """Return the ranks of a plan with the step times of its trial."""
    compute_s = tried.compute_s
    return [rank.with_step(rank.batch_size, compute_s[rank.node]) for rank in tried.ranks]


def confirmed_prediction(
    ranks: Sequence[RankPlan], result: TrialResult, gain: float | None = None
) -> Predicted:
    """Return the prediction from a plan's trial; `gain` is relative to the best equal batch size."""
    computing = [seconds for seconds in result.compute_s if seconds]
    slowest_s = max(computing)
    # What a step takes beyond the compute time of the slowest rank is communication.
    whole_s = max(result.step_s, slowest_s)
    compute_share = sum(computing) / (len(computing) * whole_s)
    communication_share = 1 - slowest_s / whole_s
    return Predicted(
        global_batch=sum(rank.batch_size for rank in ranks),
        batch_sizes=[rank.batch_size for rank in ranks],
        step_s=round(result.step_s, 6),
        samples_per_s=round(result.samples_per_s, 2),
        compute_share=round(compute_share, 4),
        imbalance_share=round(max(0.0, 1 - compute_share - communication_share), 4),
        communication_share=round(communication_share, 4),
        gain=None if gain is None else round(gain, 3),
        is_confirmed=True,
    )
