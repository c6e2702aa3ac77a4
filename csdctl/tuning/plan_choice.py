"""The best plan for a modelled fleet, and what to probe next: a few informative sizes. Pure.

In the first round, all machines of a class probe the same small size: their facts may be alike and their
speeds not. Later, machines of one class may probe different sizes. The fits give the batch sizes of the best
plan, and the next rounds probe at most half of those, until every class was measured there: large steps take
long, and the trial measures them.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

from csdctl.errors import option
from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import StepPrediction, predict
from csdctl.tuning.fleet_model import ClassModel, FleetModel, TrialResult, TriedPlan, predict_peak_bytes
from csdctl.tuning.measurements import ForecastErrors
from csdctl.tuning.plan import MAX_BATCH_SIZE, Predicted, RankPlan
from csdctl.tuning.search import BestPlan, Limits, find_best, find_best_ranks
from csdctl.tuning.stannis import TuningError

GOODPUT_SIZES = 20
"""Global batches to compare, each √2 times the next smaller."""
MAX_PROBES = 8
"""Maximum number of probes per class in one tuning."""
FIRST_SIZE, COMPARED_SIZE = 16, 8
"""Batch size of the first round, of a machine alone and of several in a class. A slow node takes seconds."""
MAX_GROWTH = 4
"""Limit of a probe's batch, relative to the largest that fitted: a larger jump could exhaust memory."""
NEAR = 2.5
"""A probe is informative for sizes within this factor: a trial measures the planned size itself. Half of the
planned size is probed, and the plan moves a little with the result."""
MEMORY_NEAR = 1.25
"""Near the memory limit, a larger size within this factor of a measured size is not probed."""
MIN_SIZES = 2
"""Minimum number of different sizes of a class, including earlier probes. More barely improve the plan,
because the trial that follows corrects the level of the line (benchmarks/bench_planning.py, with noise)."""
PLANNED_SHARES = (0.5, 0.3)
"""Shares of the planned size that the machines of a class probe."""


@dataclass(frozen=True)
class TunedFleet:
    """The result of a tuning run."""

    limits: Limits
    """Limits of the plan. The global batch size may have been chosen for time to accuracy."""
    model: FleetModel
    tried: TriedPlan
    """The plan that reached the most samples/s in a trial."""


def choose_plan(model: FleetModel, limits: Limits) -> BestPlan:
    """Return the plan with the most samples/s. Raises TuningError when no plan satisfies the limits."""
    candidates = model.candidates()
    if not model.is_host_training:
        return find_best(candidates, limits, model.sum_s_of_training, model.overhead_factor)
    host, *nodes = candidates
    return find_best_ranks(
        host, nodes, limits, sum_s=model.sum_s_of_training, overhead_factor=model.overhead_factor
    )


def limit_for_goodput(model: FleetModel, limits: Limits, noise_scale: float, reference_batch: int) -> Limits:
    """Return the limits within which the fastest plan reaches a loss soonest.

    Goodput is the rate of samples times what each contributes to the training, (S + R) / (S + B) for a global
    batch of B samples, the gradient noise scale S and the reference batch R, whose learning rate the recipe
    states (Qiao et al. 2021, Pollux). A sample of a batch below R contributes no more, because the learning
    rate falls with the batch. Raises TuningError when no plan satisfies the limits.
    """
    if limits.global_batch:
        return limits
    largest = limits.largest_global_batch
    plans = [choose_plan(model, limits)]
    sizes = {max(1, round(largest / 2 ** (step / 2))) for step in range(1, GOODPUT_SIZES)}
    for limit in sorted({*sizes, min(reference_batch, largest)}):
        with suppress(TuningError):  # fewer samples than ranks that must train
            plans.append(choose_plan(model, Limits(limit)))

    def goodput(plan: BestPlan) -> float:
        size = max(reference_batch, plan.global_batch)
        return plan.prediction.samples_per_s * (noise_scale + reference_batch) / (noise_scale + size)

    return Limits(max(plans, key=goodput).global_batch)


def predict_plan(model: FleetModel, batch_sizes: Mapping[str, int]) -> StepPrediction:
    """Predict a step of a plan with these batch sizes by machine."""
    members = [member for member in model.candidates() if member.node in batch_sizes]
    sum_s = model.sum_s(len(members) + (HOST_NAME not in batch_sizes))
    sizes = [batch_sizes[member.node] for member in members]
    return predict(members, sizes, sum_s, model.overhead_factor)


def with_batch_sizes(model: FleetModel, best: BestPlan, batch_sizes: Mapping[str, int]) -> BestPlan:
    """Return the plan with other batch sizes, or `best` if a machine would fall below its private share."""
    total = sum(batch_sizes.values())
    for name, share in model.private_shares.items():
        if batch_sizes.get(name, 0) < min(best.batch_sizes.get(name, 0), share * total):
            return best
    return replace(best, batch_sizes={**batch_sizes}, prediction=predict_plan(model, batch_sizes))


def predict_host_samples_per_s(model: FleetModel, limits: Limits) -> float | None:
    """Predict the samples/s of the host alone. None if it does not train, or the limits allow no plan."""
    hosts = [rank for rank in model.candidates() if rank.node == HOST_NAME]
    with suppress(TuningError):
        return find_best(hosts, limits, model.sum_s_of_training).prediction.samples_per_s if hosts else None
    return None


def plan_ranks(model: FleetModel, best: BestPlan) -> tuple[RankPlan, ...]:
    """Return the ranks of the plan file, the host first, with batch size 0 when it does not train."""
    step_times = model.step_times()
    ranks = []
    for machine, batch_size in best.batch_sizes.items():
        members = model.class_of(machine)
        # A small model has no limit of its own.
        at_once = None if members.max_at_once is None else min(members.max_at_once, MAX_BATCH_SIZE)
        rank = RankPlan.with_runtime(
            members.settings,
            node=machine,
            batch_size=batch_size,
            # Set even when this batch fits, because it may grow during a run, or in a plan for fewer nodes.
            micro_batch_size=at_once if members.is_divisible else None,
            max_batch_size=None if members.is_divisible else at_once,
            peak_memory_bytes=predict_peak_bytes(members.peaks, members.limit_at_once(batch_size)),
        )
        ranks.append(rank.with_step(batch_size, step_times[machine].at(batch_size)))
    if HOST_NAME not in best.batch_sizes:
        ranks.insert(0, RankPlan(node=HOST_NAME, batch_size=0, threads=1))
    return tuple(ranks)


def confirmed_prediction(
    batch_sizes: Sequence[int], result: TrialResult, errors: ForecastErrors, host_samples_per_s: float | None
) -> Predicted:
    """Return the prediction from a plan's trial. `batch_sizes` by rank. `errors` of earlier forecasts."""
    low, high = errors.after_trial(result.error).range_of(result.samples_per_s)
    computing = [seconds for seconds in result.compute_s if seconds]
    slowest_s = max(computing)
    # The rest of a step, after the compute time of the slowest rank, is communication.
    step_s = max(result.step_s, slowest_s)
    compute_share = sum(computing) / (len(computing) * step_s)
    communication_share = 1 - slowest_s / step_s
    return Predicted(
        global_batch=sum(batch_sizes),
        batch_sizes=[*batch_sizes],
        step_s=round(result.step_s, 6),
        samples_per_s=round(result.samples_per_s, 2),
        samples_per_s_range=(round(low, 2), round(high, 2)),
        host_samples_per_s=host_samples_per_s and round(host_samples_per_s, 2),
        compute_share=round(compute_share, 4),
        imbalance_share=round(max(0.0, 1 - compute_share - communication_share), 4),
        communication_share=round(communication_share, 4),
        is_confirmed=True,
    )


def next_probes(model: FleetModel, limits: Limits) -> dict[str, int]:
    """Return the sizes to probe next, by machine. Empty when enough is known. Raises TuningError."""
    for members in model.classes.values():
        _check_memory(members)
    sizes: Mapping[str, int] = {}
    if all(members.points for members in model.classes.values()):
        unlimited = {name: replace(its, peaks={}, too_large=None) for name, its in model.classes.items()}
        sizes = choose_plan(replace(model, classes=unlimited), limits).batch_sizes
    most = max(1, limits.largest_global_batch - len(model.machines) + 1)
    probes: dict[str, int] = {}
    for members in model.classes.values():
        if not model.outlier_factors.keys() >= {*members.machines} and len(members.machines) > 1:
            largest = members.too_large - 1 if members.too_large else COMPARED_SIZE
            probes |= dict.fromkeys(members.machines, max(1, min(COMPARED_SIZE, largest, most)))
            continue
        fastest_first = sorted(members.machines, key=lambda name: model.outlier_factors.get(name, 1.0))
        planned = max((sizes[machine] for machine in members.machines if machine in sizes), default=None)
        probes |= zip(fastest_first, _next_class_sizes(members, planned, most), strict=False)
    return probes


def _check_memory(members: ClassModel) -> None:
    """Raise TuningError when the probes of this tuning show that a class cannot train any batch."""
    if members.points or not members.num_new_probes:
        return
    if members.too_large == 1 or members.num_new_probes >= MAX_PROBES:
        samples = "even 1 sample" if members.too_large == 1 else f"{members.too_large} samples"
        raise TuningError(
            f"{members.machines[0]} cannot train {samples} at a time: out of memory",
            remedy=f"leave it out: {option('exclude')}, or {option('is_host_training=False')} for the host",
        )


def _next_class_sizes(members: ClassModel, planned: int | None, most: int) -> list[int]:
    """Return the sizes to probe next, at most one for each machine. Empty when the class is known.

    `planned`: its size in the best plan, None: unknown, or left out. `most`: the largest size of any plan.
    """
    count = min(MAX_PROBES - members.num_new_probes, len(members.machines))
    if count < 1:
        return []
    if not members.is_divisible and members.max_at_once:
        most = min(most, members.max_at_once)
    if not members.points and members.too_large is not None:
        return [max(1, members.too_large // MAX_GROWTH)]
    if not members.points:
        return [min(FIRST_SIZE, most)]
    if planned is None:
        return []
    measured = (*members.sizes, *members.trial_sizes)
    if len(members.sizes) >= min(MIN_SIZES, most) and any(
        planned / NEAR <= size <= planned * NEAR for size in measured
    ):
        return []  # measured near the planned size, and at another size
    largest = max(members.sizes)
    limit = min(most, MAX_GROWTH * largest)
    if members.too_large:
        limit = min(limit, members.too_large - 1)
    if planned > limit * NEAR:
        # Approach the planned size as far as memory allows. At the limit, use what is known.
        return [limit] if limit > largest * MEMORY_NEAR else []
    around = dict.fromkeys(min(limit, ceil(planned * share)) for share in PLANNED_SHARES)
    if len(members.sizes) < 2:  # a line needs two sizes
        around = dict.fromkeys(size for size in around if size not in members.sizes) or around
    return list(around)[:count]
