"""Algorithm 1 of the STANNIS paper, as we read it (docs/explanation/algorithm-1.md).

The slowest engine takes the batch size at which it is fastest. The batch of every other engine grows until
its step takes as long, plus a margin for the slow-down of synchronization.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from csdctl.errors import InputError, option
from csdctl.fleet.model import HOST_NAME
from csdctl.tuning.measurements import Point

Measure = Callable[[Mapping[str, int]], Mapping[str, float | None]]
"""Returns the step time in seconds of each engine, measured at the same time; None: out of memory."""

DEFAULT_BATCH_SIZES = (4, 8, 16, 32, 64)
DEFAULT_STEP_DIVISOR = 2.0
DEFAULT_MARGIN_SCALE = 20.0
"""The paper uses 5 for its slow-down; csdctl's sum over the ranks takes about 5% of a step."""
MAX_ROUNDS = 100


class TuningError(InputError):
    """No plan is possible with these limits on these machines."""


def tune_stannis(
    engines: Sequence[str],
    measure: Measure,
    *,
    batch_sizes: Sequence[int] = DEFAULT_BATCH_SIZES,
    step_divisor: float = DEFAULT_STEP_DIVISOR,
    margin_scale: float = DEFAULT_MARGIN_SCALE,
) -> dict[str, Point]:
    """Return batch sizes by Algorithm 1.

    `batch_sizes` is the paper's list BS, `step_divisor` its C (dimensionless, larger values take smaller
    steps) and `margin_scale` its E (the paper's 5 allows 20% over the slowest engine's time). An engine that
    runs out of memory at a size is not tried at larger ones. Raises TuningError when no size fits an engine.
    """
    check_arguments(batch_sizes, step_divisor, margin_scale)
    lists, too_large = _measure_list(engines, measure, sorted(set(batch_sizes)))
    best = {engine: max(points, key=lambda point: point.samples_per_s) for engine, points in lists.items()}
    slowest = min(engines, key=lambda engine: best[engine].samples_per_s)
    anchor = best[slowest]
    similar_s = anchor.step_time_s * (1 - 1 / margin_scale)
    tuned = {slowest: anchor}
    growing: dict[str, Point] = {}
    for engine, points in lists.items():
        at_anchor = [point for point in points if point.batch_size == anchor.batch_size]
        shorter = [point for point in points if point.step_time_s <= anchor.step_time_s]
        if engine == slowest:
            continue
        if at_anchor and at_anchor[0].step_time_s >= similar_s:
            tuned[engine] = at_anchor[0]
        else:  # from the largest size that takes no longer than the anchor
            growing[engine] = shorter[-1] if shorter else points[0]
    for _ in range(MAX_ROUNDS):
        next_sizes = {
            engine: size
            for engine, point in growing.items()
            if (size := _larger(point, anchor, margin_scale, step_divisor, too_large=too_large.get(engine)))
        }
        if not next_sizes:
            return {engine: (tuned | growing)[engine] for engine in engines}
        sizes = {engine: point.batch_size for engine, point in (tuned | growing).items()} | next_sizes
        times = measure(sizes)
        for engine, size in next_sizes.items():
            time_s = times[engine]
            if time_s is None:
                too_large[engine] = size
            else:
                growing[engine] = Point(size, time_s)
    problem = f"C = {step_divisor} makes the steps too small: not finished after {MAX_ROUNDS} rounds"
    raise TuningError(problem, remedy=f"use a smaller {option('step_divisor')}")


def check_arguments(batch_sizes: Sequence[int], step_divisor: float, margin_scale: float) -> None:
    """Raise TuningError for arguments that Algorithm 1 cannot work with."""
    if not batch_sizes or min(batch_sizes) < 1:
        problem = f"expected one or more batch sizes of at least 1, received {list(batch_sizes)}"
        raise TuningError(problem, remedy=f"set {option('batch_sizes')}, for example to 4,8,16,32")
    for symbol, name, value in (("C", "step_divisor", step_divisor), ("E", "margin_scale", margin_scale)):
        if not (math.isfinite(value) and value > 0):
            problem = f"{symbol} must be a positive number, received {value}"
            raise TuningError(problem, remedy=f"change {option(name)}")


def _larger(
    point: Point, anchor: Point, margin_scale: float, step_divisor: float, *, too_large: int | None
) -> int | None:
    """Return the next size of the while loop, None at its end. `too_large` does not fit in memory.

    BS += BS × (final time − time) / C, times in units of the slowest engine's time. The difference is at
    least the margin. Otherwise it would vanish before the loop ends.
    """
    margin_s = anchor.step_time_s / margin_scale
    missing_s = anchor.step_time_s + margin_s - point.step_time_s
    if missing_s <= 0:
        return None
    missing = max(missing_s, margin_s) / anchor.step_time_s
    larger = point.batch_size + max(1, round(point.batch_size * missing / step_divisor))
    if too_large is not None:
        larger = min(larger, (point.batch_size + too_large) // 2)
    return larger if larger > point.batch_size else None


def _measure_list(
    engines: Sequence[str], measure: Measure, batch_sizes: Sequence[int]
) -> tuple[dict[str, list[Point]], dict[str, int]]:
    """Benchmark every engine over the list. Also return the sizes at which engines ran out of memory."""
    lists: dict[str, list[Point]] = {engine: [] for engine in engines}
    too_large: dict[str, int] = {}
    for batch_size in batch_sizes:
        fitting = [engine for engine in engines if engine not in too_large]
        for engine, time_s in measure(dict.fromkeys(fitting, batch_size)).items() if fitting else ():
            if time_s is None:
                too_large[engine] = batch_size
            else:
                lists[engine].append(Point(batch_size, time_s))
    for engine, points in lists.items():
        if not points:
            leave_out = "" if engine == HOST_NAME else f", or leave it out: {option('exclude')} {engine}"
            problem = f"{engine} cannot train even {batch_sizes[0]} samples at a time: out of memory"
            raise TuningError(problem, remedy=f"use smaller {option('batch_sizes')}{leave_out}")
    return lists, too_large
