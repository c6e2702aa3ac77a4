"""Batch sizes that adapt to the ranks' speeds during a run: trials, judged by the time of a step. Pure.

The compute times of the ranks suggest other batch sizes. Whether these make steps shorter is not certain: a
rank that waits may save a quota of the CPU for its next step, and ranks of one machine share its cores. So
every change is a trial, between steps with the batch sizes before: a machine's speed changes, too. It is kept
if steps are shorter with it, and taken back otherwise.

Every rank sees the same times (they are sent with the gradient), so every rank makes the same decision. The
global batch size stays constant.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from csdctl.worker.group.values import MAX_STEP_S
from csdctl.worker.protocol.events import COMPARED, KEPT, TAKEN_BACK, TRIED
from csdctl.worker.protocol.statistics import standard_error

WINDOWS = (5, 15, 60)
"""Numbers of steps after which an imbalance is looked for. A large one is certain after a few."""
MIN_STEPS, MAX_STEPS = WINDOWS[0], WINDOWS[-1]
"""The fewest and the most steps of a trial, and of the steps before it that it is compared with."""
NUM_SKIPPED = 2
"""Steps after a change that do not count: a duration arrives one step later, and the first step is slower."""
MIN_GAIN = 0.01
"""The share of a step that a change must promise to save."""
CERTAIN, LIKELY = 4.0, 1.5
"""Standard errors at which a difference is certain, and at which it counts at the end of a trial."""
LARGE = 0.2
"""A certain gain of this share of a step is kept without a comparison."""
MIN_SCALE = 0.25
"""A change that failed is tried again at half its size, down to this share of it."""
NEW_IF_GROWN, NEW_IF_LONGER = 2.0, 1.15
"""After a change has failed, an imbalance is a new one when it has grown by this factor, or steps have."""
MAX_LOSS, FREE_STEPS = 0.015, 1
"""No trial begins once failed ones have cost more than FREE_STEPS steps and this share of all time."""


@dataclass(frozen=True)
class Change:
    """Batch sizes from the next step on, or that the present ones are kept."""

    batch_sizes: dict[int, int]
    outcome: str
    """TRIED; COMPARED, for the sizes before once more; KEPT or TAKEN_BACK."""
    slowest: int
    """The rank that the others waited for before the trial."""
    slowdown: float
    """Its compute time before the trial, relative to a balanced step."""
    scale: float
    """The share of the change that the compute times suggested."""
    step_s: float
    """Seconds of a step before the trial."""
    gain: float = 0.0
    """By which share steps were shorter in the trial. 0 at its start."""


class Balancer:
    """Watches the ranks' compute times and the durations of steps, and tries other batch sizes."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        """`limits`: the largest batch size that fits into the memory of each rank."""
        self._limits = dict(limits)
        self._trial: Change | None = None
        """The latest change, while its outcome is open."""
        self.forget()

    def forget(self) -> dict[int, int]:
        """Start again: other ranks take part. Return the batch sizes before an open trial, {} without one."""
        is_trying = self._trial is not None and self._trial.outcome == TRIED
        sizes = self._before[0] if is_trying else {}
        self._trial = None
        self._before: tuple[dict[int, int], list[float]] = {}, []
        """Batch sizes and durations before the trial."""
        self._tried: tuple[dict[int, int], list[float]] = {}, []
        """Batch sizes and durations of the trial."""
        self._failed: dict[int, Change] = {}
        """By slowest rank, its latest trial without a gain, with the greatest values of its failed trials.

        Empty again after a change was kept.
        """
        self._total_s = self._lost_s = 0.0
        """Time of all steps so far, and what failed trials have added to it."""
        self._watch()
        return sizes

    def _watch(self) -> None:
        """Begin to measure the batch sizes of the next step."""
        self._num_watched = 0
        self._times: list[dict[int, float]] = []
        """Compute seconds of each rank by step."""
        self._durations: list[float] = []
        """Seconds from one step to the next."""

    def observe(self, times_s: Mapping[int, float], previous_step_s: float) -> None:
        """Add the compute seconds of one full step by rank, and the duration of the step before.

        A duration of 0 is unknown. A step with an impossible time does not count, whichever rank sent it.
        """
        self._num_watched += 1
        is_known = 0 < previous_step_s <= MAX_STEP_S  # NaN is not
        self._total_s += previous_step_s if is_known else 0.0
        if self._num_watched <= NUM_SKIPPED:
            return
        if all(0 <= seconds <= MAX_STEP_S for seconds in times_s.values()):
            self._times = [*self._times[1 - MAX_STEPS :], dict(times_s)]
        if is_known:
            self._durations = [*self._durations[1 - MAX_STEPS :], previous_step_s]

    def decide(
        self,
        batch_sizes: Mapping[int, int],
        find_least: Callable[[], Mapping[int, int]] = dict,
        *,
        may_try: bool = True,
    ) -> Change | None:
        """Return other batch sizes with the same sum, or that a trial has succeeded. None: nothing changes.

        A rank with batch size 0 keeps it. `find_least` returns the smallest batch sizes, by default 1. It is
        called only where a trial may follow. `may_try`: whether a trial may begin.
        """
        change = None
        if self._trial:
            change = (self._judge if self._trial.outcome == TRIED else self._compare)(self._trial)
        elif may_try:
            change = self._propose(batch_sizes, find_least)
        if change:
            self._trial = change if change.outcome in (TRIED, COMPARED) else None
            self._watch()
        return change

    def _propose(
        self, batch_sizes: Mapping[int, int], find_least: Callable[[], Mapping[int, int]]
    ) -> Change | None:
        if len(self._durations) < MIN_STEPS:
            return None
        if self._lost_s > MAX_LOSS * self._total_s + FREE_STEPS * fmean(self._durations):
            return None
        sizes = {rank: size for rank, size in batch_sizes.items() if size}
        total = sum(sizes.values())
        for window in WINDOWS:
            steps = self._times[-window:]
            if len(steps) < window or (self._num_watched - NUM_SKIPPED) % window:
                continue
            compute_s = {rank: mean_without_longest([step[rank] for step in steps]) for rank in sizes}
            slowest = max(compute_s, key=lambda rank: compute_s[rank])
            slowdown = compute_s[slowest] / balanced_s(sizes, compute_s)
            error = standard_error([step[slowest] / balanced_s(sizes, step) for step in steps])
            speeds = {rank: size / max(1e-9, compute_s[rank]) for rank, size in sizes.items()}
            before = self._durations[-window:]
            step_s = fmean(before)
            scale = self._choose_scale(slowest, slowdown, step_s)
            suggested = apportion_above(find_least(), total, speeds, self._limits) or sizes
            better = apportion(
                total,
                {rank: size + scale * (suggested[rank] - size) for rank, size in sizes.items()},
                self._limits,
            )
            # Where a limit binds, balance is out of reach, and there may be nothing to gain.
            saved_s = compute_s[slowest] - max(size / speeds[rank] for rank, size in better.items())
            # What a trial cannot show is not tried.
            needed_gain = max(MIN_GAIN, CERTAIN * standard_error(before))
            if slowdown > 1 + CERTAIN * error and saved_s > needed_gain * step_s:
                tried = {**batch_sizes, **better}
                self._before, self._tried = (dict(batch_sizes), before), (tried, [])
                return Change(tried, TRIED, slowest, slowdown, scale=scale, step_s=step_s)
        return None

    def _choose_scale(self, slowest: int, slowdown: float, step_s: float) -> float:
        """Return which share of a change to try: less than 1, and at last 0, if a similar one has failed."""
        if (failed := self._failed.get(slowest)) is None:
            return 1.0
        if slowdown - 1 > NEW_IF_GROWN * (failed.slowdown - 1) or step_s > NEW_IF_LONGER * failed.step_s:
            return 1.0
        return failed.scale / 2 if failed.scale > MIN_SCALE else 0.0

    def _judge(self, trial: Change) -> Change | None:
        """Return what follows from the steps of a trial. None: it goes on."""
        (sizes, before), after = self._before, self._durations
        if len(after) < MIN_STEPS and not (len(after) > 1 and min(after) > max(before)):
            return None
        gain = 1 - mean_without_longest(after) / mean_without_longest(before)
        error = math.hypot(standard_error(before), standard_error(after))
        is_open = -LIKELY * error <= gain <= CERTAIN * error  # a loss ends a trial earlier than a gain
        if len(after) >= MIN_STEPS and is_open and len(after) < MAX_STEPS:
            return None
        if gain <= LIKELY * error:
            return self._take_back(trial, gain)
        if gain > LARGE:
            return self._keep(trial, gain)
        self._tried = trial.batch_sizes, after
        return replace(trial, batch_sizes=sizes, outcome=COMPARED, gain=gain)

    def _compare(self, trial: Change) -> Change | None:
        """Return the outcome of a trial, by steps with the batch sizes before once more. None: it goes on.

        These are at most as many as the trial had: fewer, if the difference is certain.
        """
        (_, tried), again = self._tried, self._durations
        if len(again) < MIN_STEPS:
            return None
        before = self._before[1][-len(tried) :]
        tried_s, before_s, again_s = map(mean_without_longest, (tried, before, again))
        of_tried, of_before, of_again = map(standard_error, (tried, before, again))
        # By the second, the speed of the machine may change steadily.
        references = (again_s, of_again), ((before_s + again_s) / 2, math.hypot(of_before, of_again) / 2)
        gains = [1 - tried_s / reference_s for reference_s, _ in references]
        errors = [math.hypot(of_tried, error) for _, error in references]
        is_over = len(again) >= len(tried)
        needed = LIKELY if is_over else CERTAIN
        if all(gain > needed * error for gain, error in zip(gains, errors, strict=True)):
            return self._keep(trial, min(gains))
        is_longer = all(gain < -LIKELY * error for gain, error in zip(gains, errors, strict=True))
        return self._take_back(trial, max(gains)) if is_over or is_longer else None

    def _keep(self, trial: Change, gain: float) -> Change:
        self._failed.clear()
        return replace(trial, batch_sizes=self._tried[0], outcome=KEPT, gain=gain)

    def _take_back(self, trial: Change, gain: float) -> Change:
        earlier = self._failed.get(trial.slowest, trial)
        self._failed[trial.slowest] = replace(
            trial, slowdown=max(trial.slowdown, earlier.slowdown), step_s=max(trial.step_s, earlier.step_s)
        )
        self._lost_s += max(0.0, -gain) * trial.step_s * self._num_watched
        return replace(trial, batch_sizes=self._before[0], outcome=TAKEN_BACK, gain=gain)


def balanced_s(sizes: Mapping[int, int], step_s: Mapping[int, float]) -> float:
    """Return the seconds of a step in which all ranks compute equally long, at their speeds in `step_s`."""
    return sum(sizes.values()) / sum(size / max(1e-9, step_s[rank]) for rank, size in sizes.items())


def apportion_above(
    least: Mapping[int, int], total: int, speeds: Mapping[int, float], limits: Mapping[int, int]
) -> dict[int, int]:
    """Divide `total` samples as `apportion` does, not below the `least` of a rank. {} if impossible."""
    fixed: dict[int, int] = {}
    while free_speeds := {rank: speed for rank, speed in speeds.items() if rank not in fixed}:
        num_free = total - sum(fixed.values())
        if num_free < len(free_speeds):
            break
        shared = apportion(num_free, free_speeds, limits)
        below = {rank: least[rank] for rank, size in shared.items() if size < least.get(rank, 1)}
        if not below:
            return dict(sorted({**fixed, **shared}.items()))
        fixed |= below
    return {}


def apportion(total: int, speeds: Mapping[int, float], limits: Mapping[int, int]) -> dict[int, int]:
    """Divide `total` samples among ranks by their speeds, at least 1 each, within the limits.

    When the limits add up to less than `total` they are exceeded: the global batch size has priority.
    """
    num_certain, total_speed = total - len(speeds), sum(speeds.values())
    sizes = {
        rank: max(1, min(int(num_certain * speed / total_speed), limits.get(rank, total)))
        for rank, speed in speeds.items()
    }

    def place_in_queue(rank: int) -> tuple[bool, float, int]:
        """Return the place of a rank in the queue for one more sample: by its time, full ranks last."""
        return sizes[rank] >= limits.get(rank, total), (sizes[rank] + 1) / speeds[rank], rank

    queue = sorted(map(place_in_queue, sizes))
    for _ in range(total - sum(sizes.values())):
        rank = queue[0][-1]
        sizes[rank] += 1
        heapq.heapreplace(queue, place_in_queue(rank))
    return dict(sorted(sizes.items()))


def mean_without_longest(times_s: Sequence[float]) -> float:
    """Return the mean time without the longest step: one slow step does not make a slow node."""
    kept = sorted(times_s)[: -1 if len(times_s) >= MIN_STEPS else None]
    return sum(kept) / len(kept)
