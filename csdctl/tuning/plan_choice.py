"""The best plan for a modelled fleet, and what to probe next: few sizes, where they tell most. Pure.

Machines of one class may probe different batch sizes in a round. The first round uses small sizes, which are
quick. Then the fits give the batch sizes of the best plan, and the next rounds probe at most half of those,
until every class was measured there: large steps take long, and the trial measures them.

Other settings are compared at a batch size that was measured with the usual settings.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import ceil
from statistics import median

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import RankModel, StepTime, predict
from csdctl.tuning.fleet_model import MAX_PROBES, ClassModel, FleetModel, TrialResult
from csdctl.tuning.measurements import ForecastErrors, Point
from csdctl.tuning.plan import MAX_BATCH_SIZE, Predicted, RankPlan
from csdctl.tuning.search import BestPlan, Limits, best_equal, find_best, find_best_ranks
from csdctl.tuning.stannis import TuningError
from csdctl.worker.protocol.run_spec import Runtime

GOODPUT_SIZES = 20
"""Global batches to compare, each √2 of the next smaller one."""


FIRST_SIZES = {1: (16,), 2: (4, 16), 3: (2, 6, 16)}
MAX_GROWTH = 4
NEAR = 2.5
MEMORY_NEAR = 1.25
MIN_SIZES = 2
PLANNED_SHARES = (0.5, 0.3)
MIN_SETTINGS_GAIN = 0.15
COMPARABLE_FACTOR = 4
MANY_THREADS = 4


def choose_plan(
    model: FleetModel, limits: Limits, step_times: Mapping[str, StepTime] | None = None
) -> BestPlan:
    """Return the plan with the most samples/s. `step_times` by class, None: those of `model`.

    Raises TuningError when no plan satisfies the limits.
    """
    candidates = list_candidates(model, step_times)
    if not model.is_host_training:
        return find_best(candidates, limits, model.sum_s_of_training, model.overhead_factor)
    return find_best_ranks(
        candidates[0], candidates[1:], limits, model.sum_s_of_training, model.overhead_factor
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
        size = max(reference_batch, sum(plan.batch_sizes.values()))
        return plan.prediction.samples_per_s * (noise_scale + reference_batch) / (noise_scale + size)

    return Limits(sum(max(plans, key=goodput).batch_sizes.values()))


def choose_class_sizes(
    model: FleetModel, limits: Limits, step_times: Mapping[str, StepTime]
) -> Mapping[str, int]:
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
        RankModel(
            machine,
            step_time,
            is_required=machine in model.required,
            private_share=model.private_shares.get(machine, 0.0),
        )
        for machine, step_time in model.machine_step_times(step_times).items()
    ]


def predict_samples_per_s(model: FleetModel, batch_sizes: Mapping[str, int]) -> float:
    """Predict the samples/s of a plan with these batch sizes, by machine in the order of the fleet."""
    members = [member for member in list_candidates(model) if member.node in batch_sizes]
    sum_s = model.sum_s(len(members) + (HOST_NAME not in batch_sizes))
    return predict(members, [*batch_sizes.values()], sum_s, model.overhead_factor).samples_per_s


def choose_equal_plan(model: FleetModel, limits: Limits) -> BestPlan | None:
    """Return the fastest plan with the same batch size on every machine. None: there is no such plan."""
    if any(share > 1 / len(model.machines) for share in model.private_shares.values()):
        return None  # a machine has more private samples than its part of equal batches
    return best_equal(list_candidates(model), limits, model.sum_s_of_training, model.overhead_factor)


def predict_host_samples_per_s(model: FleetModel, limits: Limits) -> float | None:
    """Predict the samples/s of the host alone. None if it does not train, or the limits allow no plan."""
    hosts = [rank for rank in list_candidates(model) if rank.node == HOST_NAME]
    with suppress(TuningError):
        return find_best(hosts, limits, model.sum_s_of_training).prediction.samples_per_s if hosts else None
    return None


def plan_ranks(model: FleetModel, best: BestPlan) -> tuple[RankPlan, ...]:
    """Return the ranks of the plan file, the host first, with batch size 0 when it does not train."""
    step_times = model.machine_step_times()
    ranks = tuple(_plan_rank(model, name, size, step_times[name]) for name, size in best.batch_sizes.items())
    if HOST_NAME in best.batch_sizes:
        return ranks
    return (RankPlan(node=HOST_NAME, batch_size=0, threads=1), *ranks)


def _plan_rank(model: FleetModel, machine: str, batch_size: int, step_time: StepTime) -> RankPlan:
    known = model.class_of(machine)
    # A small model has no limit of its own.
    at_once = None if known.max_at_once is None else min(known.max_at_once, MAX_BATCH_SIZE)
    rank = RankPlan(
        node=machine,
        batch_size=batch_size,
        **asdict(known.settings),
        # Set even when this batch fits, because it may grow during a run, or in a plan for fewer nodes.
        micro_batch_size=at_once if known.is_divisible else None,
        max_batch_size=None if known.is_divisible else at_once,
        peak_memory_bytes=known.predict_peak_bytes(batch_size),
    )
    return rank.with_step(batch_size, step_time.at(batch_size))


def confirmed_prediction(
    ranks: Sequence[RankPlan],
    result: TrialResult,
    errors: ForecastErrors,
    gain: float | None = None,
    host_samples_per_s: float | None = None,
    gain_without_nodes: float | None = None,
) -> Predicted:
    """Return the prediction from a plan's trial. The gains are relative to other plans that were tried.

    `errors`: those of earlier forecasts. `host_samples_per_s`: predicted for the host alone.
    """
    low, high = errors.after_trial(result.error).range_of(result.samples_per_s)
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
        samples_per_s_range=(round(low, 2), round(high, 2)),
        host_samples_per_s=host_samples_per_s and round(host_samples_per_s, 2),
        compute_share=round(compute_share, 4),
        imbalance_share=round(max(0.0, 1 - compute_share - communication_share), 4),
        communication_share=round(communication_share, 4),
        gain=None if gain is None else round(gain, 3),
        gain_without_nodes=None if gain_without_nodes is None else round(gain_without_nodes, 3),
        is_confirmed=True,
    )


"""Batch sizes of the first round, by number of machines that measure; a slow node takes seconds for them."""
"""Limit of a probe's batch, relative to the largest that fitted: memory may be exhausted in between."""
"""A probe is informative for sizes within this factor: a trial measures the planned size itself. Half of the
planned size is probed, and the plan moves a little with the result."""
"""Near the memory limit, a larger size within this factor of a measured size is not probed."""
"""Minimum number of different sizes of a class, including earlier probes. More hardly improve the plan,
because the trial that follows corrects the level of the line (benchmarks/bench_planning.py, with noise)."""
"""Shares of the planned size that the machines of a class probe."""

ChooseSizes = Callable[[Mapping[str, StepTime]], Mapping[str, int]]
"""Returns each class's batch size in the best plan, given all step times; no entry for a class left out."""


def limit_sizes(model: FleetModel, limits: Limits) -> FleetModel:
    """Return the model with the largest batch that a plan can give a machine."""
    max_size = max(1, limits.largest_global_batch - len(model.machines) + 1)
    classes = {name: replace(known, max_size=max_size) for name, known in model.classes.items()}
    return replace(model, classes=classes)


def next_probes(model: FleetModel, choose: ChooseSizes) -> dict[str, int]:
    """Return the batch sizes to probe next, by machine. Empty when enough is known about every class.

    Raises TuningError when no size of a class fits in memory, and what `choose` raises.
    """
    classes = model.classes.values()
    for known in classes:
        _check_memory(known)
    are_known = all(known.points for known in classes)
    times = {name: known.step_time_at_once() for name, known in model.classes.items()} if are_known else {}
    planned = choose(times) if times else {}
    return {
        machine: size
        for name, known in model.classes.items()
        for machine, size in zip(known.machines, _next_class_sizes(known, planned.get(name)), strict=False)
    }


def _check_memory(known: ClassModel) -> None:
    """Raise TuningError when the probes of this tuning show that a class cannot train any batch."""
    if known.points or not known.num_new_probes:
        return
    if known.too_large == 1 or known.num_new_probes >= MAX_PROBES:
        samples = "even 1 sample" if known.too_large == 1 else f"{known.too_large} samples"
        raise TuningError(
            f"{known.machines[0]} cannot train {samples} at a time: out of memory",
            remedy="leave it out: `--exclude`, or `--no-host` for the host",
        )


def _next_class_sizes(known: ClassModel, planned: int | None) -> list[int]:
    """Return the sizes to probe next, at most one for each machine. Empty when the class is known."""
    count = min(MAX_PROBES - known.num_new_probes, len(known.machines))
    if count < 1:
        return []
    if not known.points:
        return _first_sizes(known, count)
    measured = (*known.sizes, *known.trial_sizes)
    if planned is None or (
        len(known.sizes) >= MIN_SIZES and any(planned / NEAR <= size <= planned * NEAR for size in measured)
    ):
        return []  # left out, or known: measured near the planned size, and at another size
    largest = max(known.sizes)
    limit = known.cap(
        min(MAX_GROWTH * largest, known.too_large - 1 if known.too_large else MAX_GROWTH * largest)
    )
    if planned > limit * NEAR:
        # Approach the planned size as far as memory allows; at the limit, use what is known.
        return [limit] if limit > largest * MEMORY_NEAR else []
    around = dict.fromkeys(min(limit, ceil(planned * share)) for share in PLANNED_SHARES)
    if len(known.sizes) < 2:  # a line needs two sizes
        around = dict.fromkeys(size for size in around if size not in known.sizes) or around
    return list(around)[:count]


def _first_sizes(known: ClassModel, count: int) -> list[int]:
    """Return sizes for a class without a probe that fitted in memory."""
    if known.too_large is not None:
        return [max(1, known.too_large // MAX_GROWTH)]
    sizes = FIRST_SIZES[min(count, max(FIRST_SIZES))]
    return list(dict.fromkeys(known.cap(size) for size in sizes))


"""Other settings are used when a step takes at least this share less time; less may be noise."""
"""Other settings are probed with at least 1/COMPARABLE_FACTOR of the planned batch, where one was measured:
with few samples, different settings may be faster."""

SettingsSearch = Mapping[str, tuple[int, Sequence[Runtime]]]
"""What to compare, by class: the batch size, and the settings, most promising first."""


def plan_settings_search(model: FleetModel, limits: Limits) -> SettingsSearch:
    """Return what to compare for classes without an earlier trial. Raises what `choose_plan` raises."""
    planned = choose_class_sizes(model, limits, model.step_times())
    search = {}
    for name, known in model.classes.items():
        measured = [size for size in known.sizes if size <= planned.get(name, 0)]
        if measured and not known.trial_sizes:
            comparable = [size for size in measured if size * COMPARABLE_FACTOR >= planned[name]]
            search[name] = min(comparable, default=max(measured)), _variants(known.settings)
    return search


def next_settings(
    model: FleetModel, search: SettingsSearch
) -> tuple[dict[str, tuple[Runtime, int]], SettingsSearch]:
    """Return settings and batch size of the machines of one round, and what is left to compare after it.

    As many probes are left for each class as it needs to be known with other settings.
    """
    probes: dict[str, tuple[Runtime, int]] = {}
    left: dict[str, tuple[int, Sequence[Runtime]]] = {}
    for name, (size, variants) in search.items():
        known = model.classes[name]
        count = max(0, min(len(known.machines), MAX_PROBES - MIN_SIZES - known.num_new_probes))
        if others := variants[:count]:
            left[name] = size, variants[count:]
            usual = [known.settings] * (count - len(others))
            for machine, settings in zip(known.machines[:count], [*others, *usual], strict=True):
                probes[machine] = settings, size
    return probes, left


def settings_gain(known: ClassModel, probed: Point) -> float | None:
    """Return the share of a step's time that a probe with other settings took less. None: not enough."""
    usual_s = median(point.step_time_s for point in known.points if point.batch_size == probed.batch_size)
    gain = 1 - probed.step_time_s / usual_s
    return gain if gain > MIN_SETTINGS_GAIN else None


def _variants(settings: Runtime) -> list[Runtime]:
    variants = [replace(settings, onednn=not settings.onednn)]
    if settings.threads >= MANY_THREADS:  # two hardware threads share the units of one core
        variants.append(replace(settings, threads=settings.threads // 2))
    if settings.threads > 1 and settings.inter_threads == 1:
        variants.append(replace(settings, inter_threads=2))
    return variants
