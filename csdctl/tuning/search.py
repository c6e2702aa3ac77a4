"""The batch sizes with the most samples/s within limits. Pure.

For a compute time T of a step, every rank takes as many samples as it can compute in T, so that no rank waits
for another. With a longer T, the share of fixed costs and of the sum over the ranks is smaller, and the
global batch is larger. So the search is only over T, once for every set of ranks worth trying.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from heapq import heapify, heappop, heappush
from math import ceil
from operator import mul

from csdctl.errors import option
from csdctl.perfmodel.prediction import RankModel, StepPrediction, StepTime, predict
from csdctl.tuning.stannis import TuningError

NUM_TIMES = 96
"""Step times to try, evenly on a logarithmic scale."""
NUM_CUTS = 12
"""Sets of ranks to try, each without some of the slowest nodes."""
MIN_GAIN_WITHOUT_NODES = 0.02
"""Nodes are left out when the fleet is faster by at least this share without them."""
MIN_GAIN_WITHOUT_HOST = 0.05
"""The host does not train when the fleet is faster by at least this share without it."""
ALMOST_BEST = 0.995
"""Of plans that reach this share of the best rate, the smallest global batch is taken."""
LINEAR_SCALING = 4
"""The default global batch is at most this many reference batches, over which the learning rate is scaled."""
STEPS_PER_EPOCH = 10
"""The default global batch leaves at least this number of steps in an epoch."""


@dataclass(frozen=True)
class Limits:
    """The limits of a plan. None: no limit. Without any limit there is no best plan (`default_limits`)."""

    max_global_batch: int | None = None
    global_batch: int | None = None
    """The exact global batch."""

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            if value < 1:
                problem = f"{name.replace('_', ' ')} must be at least 1, received {value}"
                raise TuningError(problem, remedy=f"change or omit {option(name)}")

    @property
    def given(self) -> dict[str, int]:
        """The limits that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def largest_global_batch(self) -> int:
        """The largest global batch within the limits, of which there must be one."""
        largest = self.global_batch or self.max_global_batch
        assert largest is not None
        return largest

    def without(self, num_samples: int) -> "Limits":
        """Return the limits of all ranks but some, which take `num_samples` of each step."""
        remaining = self.largest_global_batch - num_samples
        return Limits(global_batch=remaining) if self.global_batch else Limits(remaining)


@dataclass(frozen=True)
class BestPlan:
    """Batch sizes by node, in the order of the candidates. A node that is left out has none."""

    batch_sizes: dict[str, int]
    prediction: StepPrediction
    left_out: tuple[str, ...] = ()

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return sum(self.batch_sizes.values())


def find_best(
    candidates: Sequence[RankModel],
    limits: Limits,
    sum_s: Callable[[int], float],
    overhead_factor: float = 1.0,
    lone_overhead_factor: float | None = None,
) -> BestPlan:
    """Return the fastest plan. `sum_s(n)`: seconds of a sum over n ranks. The host comes first.

    `overhead_factor` as in `predict`. `lone_overhead_factor`: for a plan with one rank, None: the same.
    Raises TuningError when no plan satisfies the limits.
    """
    if not candidates:
        raise TuningError("no machine to tune")
    by_size = {len(members): members for members in _fleets(candidates, limits)}
    compared: dict[int, BestPlan] = {}
    for size, members in by_size.items():
        factor = overhead_factor if size > 1 or lone_overhead_factor is None else lone_overhead_factor
        if best := _best_of(members, limits, sum_s(size), factor):
            compared[size] = best
    if not compared:
        given = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in limits.given.items())
        options = " or ".join(f"another {option(name)}" for name in limits.given)
        problem = f"no plan for {len(candidates)} ranks satisfies {given}"
        raise TuningError(problem, remedy=f"tune with {options}, or with fewer nodes")
    best, complete = max(compared.values(), key=_rate), compared.get(len(candidates))
    if complete and _rate(best) < _rate(complete) * (1 + MIN_GAIN_WITHOUT_NODES):
        return complete
    left_out = (candidate.node for candidate in candidates if candidate.node not in best.batch_sizes)
    return replace(best, left_out=tuple(left_out))


def _rate(plan: BestPlan) -> float:
    return plan.prediction.samples_per_s


def _fleets(candidates: Sequence[RankModel], limits: Limits) -> Iterable[Sequence[RankModel]]:
    """Yield the complete fleet, then fleets without more and more of the nodes slowest at an equal share."""
    yield candidates
    share = max(1, limits.largest_global_batch // len(candidates))
    optional = sorted(
        ((rank.step_time.at(share), rank.node) for rank in candidates if not rank.is_required),
        key=lambda timed: timed[0],
        reverse=True,
    )
    cuts = {ceil(len(optional) * cut / NUM_CUTS) for cut in range(1, NUM_CUTS + 1)}
    # A few of many nodes may be best, when a sum over more ranks costs more time than they save, or all but a
    # few slow ones.
    powers = [1 << power for power in range(len(optional).bit_length())]
    cuts |= {len(optional) - few for few in powers} | set(powers)
    times = [time_s for time_s, _ in optional]
    steps = [place for place in range(1, len(times)) if times[place - 1] > 1.1 * times[place]]
    cuts |= set(steps[:NUM_CUTS])
    for cut in sorted(cuts - {0}):
        without = {node for _, node in optional[:cut]}
        if len(without) < len(candidates):
            yield [candidate for candidate in candidates if candidate.node not in without]


def _best_of(
    members: Sequence[RankModel], limits: Limits, sum_s: float, overhead_factor: float
) -> BestPlan | None:
    """Return the best plan in which all `members` train. None when the limits allow none."""
    most = limits.largest_global_batch
    if most < len(members):
        return None
    # Of many members, most have the same step time: each different one is looked at once.
    counts = Counter(member.step_time for member in members)
    places = {step_time: place for place, step_time in enumerate(counts)}
    member_places = [places[member.step_time] for member in members]
    has_private = any(member.private_share for member in members)

    def largest_within(time_s: float) -> list[int]:
        """Return the largest batch within `time_s` for each step time in `counts`."""
        return [step_time.largest_within(time_s) for step_time in counts]

    def total(sizes: Sequence[int]) -> int:
        return sum(map(mul, sizes, counts.values()))

    def sizes_at(time_s: float) -> list[int]:
        sizes = largest_within(time_s)
        return _fit_to([sizes[place] for place in member_places], members, most)

    least_s = max(step_time.at(1) for step_time in counts)
    possible = sum(count * (step_time.largest or most) for step_time, count in counts.items())
    below_s, most_s = _longest_times(
        min(most, possible), least_s, lambda time_s: total(largest_within(time_s))
    )
    # An exact global batch, or all of a limit, is cut from the shortest T that reaches it.
    times = [] if limits.global_batch else _times(least_s, below_s)
    rates: list[tuple[float, float]] = []
    for time_s in (*times, most_s):
        largest = largest_within(time_s)
        num_samples = total(largest)
        if num_samples > most or (has_private and min(largest) >= 1):
            if not (sizes := sizes_at(time_s)):
                continue
            num_samples = sum(sizes)
            slowest_s = max(member.step_time.at(size) for member, size in zip(members, sizes, strict=True))
        else:
            slowest_s = max(map(StepTime.at, counts, largest))
        if min(largest) >= 1 and num_samples == (limits.global_batch or num_samples):
            rates.append((num_samples / (slowest_s * overhead_factor + sum_s), time_s))
    if not rates:
        return None
    fastest = max(rate for rate, _ in rates)
    # In order of T, and thus of the global batch: the first that is almost as fast as the fastest, since a
    # smaller batch takes more optimizer steps.
    sizes = sizes_at(next(time_s for rate, time_s in rates if rate >= fastest * ALMOST_BEST))
    assert sizes
    prediction = predict(members, sizes, sum_s, overhead_factor)
    return BestPlan({member.node: size for member, size in zip(members, sizes, strict=True)}, prediction)


def _longest_times(most: int, least_s: float, total: Callable[[float], int]) -> tuple[float, float]:
    """Return the longest T with at most `most` samples, and the shortest with at least `most`.

    They are a share of 1e-5 apart. Both are the same where no T has that many.
    """
    low, high = least_s, least_s
    while total(high) < most:
        low, high = high, high * 2
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if total(middle) >= most else (middle, high)
    return (high, high) if total(high) == most else (low, high)


def _times(least_s: float, most_s: float) -> list[float]:
    if most_s <= least_s:
        return [most_s]
    ratio = (most_s / least_s) ** (1 / (NUM_TIMES - 1))
    return [*(least_s * ratio**number for number in range(NUM_TIMES - 1)), most_s]


def _fit_to(sizes: Sequence[int], members: Sequence[RankModel], most: int) -> list[int]:
    """Return `sizes`, cut to at most `most` together. [] if that cannot be.

    A member with private samples has at least their part of the step, also where it takes longer then.
    """
    target = min(most, sum(sizes))
    least = [max(1, ceil(member.private_share * target - 1e-9)) for member in members]
    sizes = [max(size, needed) for size, needed in zip(sizes, least, strict=True)]
    if sum(sizes) > target:
        sizes = _cut_to(sizes, members, target, least)
    is_possible = all(
        size <= (member.step_time.largest or size) for size, member in zip(sizes, members, strict=True)
    )
    return sizes if is_possible and sum(sizes) == target else []


def _cut_to(
    sizes: Sequence[int], members: Sequence[RankModel], target: int, least: Sequence[int]
) -> list[int]:
    """Reduce sizes in proportion to `target` in all, the rest from the slowest, none below its `least`."""
    total = sum(sizes)
    # Rounded up: the excess is at most one sample for each rank, and what `least` adds.
    cut = [max(needed, ceil(size * target / total)) for size, needed in zip(sizes, least, strict=True)]
    excess = sum(cut) - target
    longest = [
        (-members[place].step_time.at(size), -place) for place, size in enumerate(cut) if size > least[place]
    ]
    heapify(longest)
    while excess > 0 and longest:
        place = -heappop(longest)[1]
        taken = 1 if excess < len(cut) else max(1, min(cut[place] - least[place], excess // len(cut)))
        cut[place] -= taken
        excess -= taken
        if cut[place] > least[place]:
            heappush(longest, (-members[place].step_time.at(cut[place]), -place))
    return cut


def find_best_ranks(
    host: RankModel,
    nodes: Sequence[RankModel],
    limits: Limits,
    *,
    sum_s: Callable[[int], float],
    overhead_factor: float = 1.0,
) -> BestPlan:
    """Return the fastest plan, without the host if that is faster. `sum_s` is with it. Raises TuningError."""
    if not nodes:
        return find_best([host], limits, sum_s, overhead_factor)
    best = None
    try:  # a host alone has no overhead: the plan that leaves out all nodes is compared without it
        best = find_best([host, *nodes], limits, sum_s, overhead_factor, lone_overhead_factor=1.0)
    except TuningError:
        if not any(node.private_share for node in nodes):
            raise
    with suppress(TuningError):  # all samples, or almost all, may be private ones of the nodes
        without = find_best(nodes, limits, lambda num_nodes: sum_s(num_nodes + 1), overhead_factor)
        if best is None or _rate(without) > _rate(best) * (1 + MIN_GAIN_WITHOUT_HOST):
            return without
    if best is None:
        raise TuningError(
            "no plan gives every node as large a part of a step as its private samples are of all",
            remedy=f"tune with a larger {option('limits.max_global_batch')}, "
            f"or without {option('is_host_training=False')}",
        )
    return best


def default_limits(given: Limits, reference_batch: int, num_samples: int | None, num_required: int) -> Limits:
    """Return `given` with a default limit of the global batch, and limits of at most an epoch.

    `num_samples` of an epoch, None if unknown. `num_required` ranks must train, on at least one sample each.
    Raises TuningError when the exact global batch is larger than an epoch.
    """
    if given.global_batch and num_samples is not None and given.global_batch > num_samples:
        raise TuningError(
            f"a global batch of {given.global_batch:,} samples exceeds an epoch of {num_samples:,} samples",
            remedy=f"use a smaller {option('limits.global_batch')}",
        )
    if given.max_global_batch and num_samples is not None:
        return replace(given, max_global_batch=min(given.max_global_batch, num_samples))
    if given.given:
        return given
    largest = LINEAR_SCALING * reference_batch
    if num_samples is not None:
        largest = min(largest, num_samples // STEPS_PER_EPOCH)
    return Limits(max_global_batch=max(num_required, largest))


def read_limits(arguments: Mapping[str, float | list[int]]) -> Limits:
    """Parse the limits in a plan's `method_arguments`, written from `Limits.given`. Algorithm 1 has none."""
    names = ("max_global_batch", "global_batch")
    given = {name: value for name in names if isinstance(value := arguments.get(name), float)}
    return Limits(**{name: round(value) for name, value in given.items()})
