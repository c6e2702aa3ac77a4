"""Which batch sizes and runtime settings to probe next: few, where they are most informative; pure.

Machines of one class may probe different batch sizes in a round. The first round uses small sizes, which are
quick. Then the fits give the batch sizes of the best plan, and the next rounds probe at most half of those,
until every class was measured there: large steps take long, and the trial measures them.

Other settings are compared at a batch size that was measured with the usual settings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from statistics import median

from csdctl.perfmodel.prediction import StepTime
from csdctl.tuning.fits import Point
from csdctl.tuning.fleet_model import MAX_PROBES, ClassModel, FleetModel
from csdctl.tuning.plan_choice import choose_class_sizes
from csdctl.tuning.search import Limits
from csdctl.tuning.stannis import TuningError
from csdctl.worker.protocol.run_spec import Runtime

FIRST_SIZES = {1: (32,), 2: (8, 32), 3: (4, 12, 32)}
"""Batch sizes of the first round, by number of machines that measure."""
MAX_GROWTH = 4
"""Limit of a probe's batch, relative to the largest that fitted: memory may be exhausted in between."""
NEAR = 2.5
"""A probe is informative for sizes within this factor: a trial measures the planned size itself. Half of the
planned size is probed, and the plan moves a little with the result."""
MEMORY_NEAR = 1.25
"""Near the memory limit, a larger size within this factor of a measured size is not probed."""
MIN_SIZES = 2
"""Minimum number of different sizes of a class, including earlier probes. More hardly improve the plan,
because the trial that follows corrects the level of the line (benchmarks/bench_planning.py, with noise)."""
PLANNED_SHARES = (0.5, 0.3)
"""Shares of the planned size that the machines of a class probe."""

ChooseSizes = Callable[[Mapping[str, StepTime]], Mapping[str, int]]
"""Returns each class's batch size in the best plan, given all step times; no entry for a class left out."""


def limit_sizes(model: FleetModel, limits: Limits) -> FleetModel:
    """Return the model with the largest batch that a plan can give a machine."""
    max_size = max(1, limits.largest_global_batch - len(model.machines) + 1)
    classes = {name: replace(known, max_size=max_size) for name, known in model.classes.items()}
    return replace(model, classes=classes)


def next_probes(model: FleetModel, limits: Limits) -> dict[str, int]:
    """Return the batch sizes to probe next, by machine; empty when enough is known about every class.

    Raises TuningError when no size of a class fits in memory, or no plan satisfies the limits.
    """
    return next_sizes(model.classes, lambda step_times: choose_class_sizes(model, limits, step_times))


def next_sizes(classes: Mapping[str, ClassModel], choose: ChooseSizes) -> dict[str, int]:
    """Return what `next_probes` does, with the planned size of each class from `choose`."""
    for known in classes.values():
        _check_memory(known)
    are_known = all(known.points for known in classes.values())
    planned = (
        choose({name: known.step_time_at_once() for name, known in classes.items()}) if are_known else {}
    )
    return {
        machine: size
        for name, known in classes.items()
        for machine, size in zip(known.machines, _next_class_sizes(known, planned.get(name)), strict=False)
    }


def is_settled(known: ClassModel, size: int) -> bool:
    """Return whether the step at `size` is known: measured near that size, and at another size."""
    is_near = any(size / NEAR <= measured <= size * NEAR for measured in (*known.sizes, *known.trial_sizes))
    return is_near and len(known.sizes) >= MIN_SIZES


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
    """Return the sizes to probe next, at most one for each machine; empty when the class is known."""
    count = min(MAX_PROBES - known.num_new_probes, len(known.machines))
    if count < 1:
        return []
    if not known.points:
        return _first_sizes(known, count)
    if planned is None or is_settled(known, planned):
        return []
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


MIN_SETTINGS_GAIN = 0.15
"""Other settings are used when a step takes at least this share less time; less may be noise."""
COMPARABLE_FACTOR = 4
"""Other settings are probed with at least 1/COMPARABLE_FACTOR of the planned batch, where one was measured:
with few samples, different settings may be faster."""
MANY_THREADS = 4

SettingsSearch = Mapping[str, tuple[int, Sequence[Runtime]]]
"""What to compare, by class: the batch size, and the settings, most promising first."""


def plan_settings_search(model: FleetModel, limits: Limits) -> SettingsSearch:
    """Return what to compare for classes without an earlier trial; raises what `choose_plan` raises."""
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
    """Return the share of a step's time that a probe with other settings took less; None: not enough."""
    usual_s = median(point.step_time_s for point in known.points if point.batch_size == probed.batch_size)
    gain = 1 - probed.step_time_s / usual_s
    return gain if gain > MIN_SETTINGS_GAIN else None


def _variants(settings: Runtime) -> list[Runtime]:
    variants = [replace(settings, onednn=not settings.onednn)]
    if settings.threads >= MANY_THREADS:  # two hardware threads share the units of one core
        variants.append(replace(settings, threads=settings.threads // 2))
    if settings.threads > 1:
        variants.append(replace(settings, inter_threads=2))
    return variants
