"""Batch sizes that adapt to the ranks' speeds during a run: trials, judged by the time of a step. Pure.

The compute times of the ranks suggest other batch sizes. Whether these make steps shorter is not certain: a
rank that waits may save a quota of the CPU for its next step, and ranks of one machine share its cores. So
every change is a trial. It is kept if steps become shorter, and taken back otherwise.

Every rank sees the same times (they are sent with the gradient), so every rank makes the same decision. The
global batch size stays constant.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from csdctl.worker.group.values import MAX_STEP_S
from csdctl.worker.protocol.events import KEPT, TAKEN_BACK, TRIED
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
MIN_SCALE = 0.25
"""A change that failed is tried again at half its size, down to this share of it."""
NEW = 0.5
"""An imbalance is a new one when it has grown or shrunk by this share since a change failed."""
MAX_LOSS, FREE_STEPS = 0.015, 1
"""Failed trials may lose this share of the time so far, in addition to the time of this number of steps."""


@dataclass(frozen=True)
class Change:
    """Batch sizes from the next step on, or that the present ones are kept."""

    batch_sizes: dict[int, int]
    outcome: str
    """TRIED, KEPT or TAKEN_BACK."""
    slowest: int
    """The rank that the others waited for before the trial."""
    slowdown: float
    """Its compute time before the trial, relative to a balanced step."""
    scale: float
    """The share of the change that the compute times suggested."""
    gain: float = 0.0
    """By which share steps were shorter in the trial. 0 at its start."""


class Balancer:
    """Watches the ranks' compute times and the durations of steps, and tries other batch sizes."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        """`limits`: the largest batch size that fits into the memory of each rank."""
        self._limits = dict(limits)
        self.forget()

    def forget(self) -> None:
        """Start again: other ranks take part."""
        self._trial: Change | None = None
        self._sizes_before: dict[int, int] = {}
        self._durations_before: list[float] = []
        """Before the trial."""
        self._failed: Change | None = None
        """The latest trial without a gain, until a change is kept."""
        self._total_s = self._lost_s = 0.0
        """Time of all steps so far, and what failed trials have added to it."""
        self._watch()

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

    def decide(self, batch_sizes: Mapping[int, int], *, may_try: bool = True) -> Change | None:
        """Return other batch sizes with the same sum, or that a trial has succeeded. None: nothing changes.

        A rank with batch size 0 keeps it. `may_try`: whether a trial may begin.
        """
        change = None
        if self._trial:
            change = self._judge(self._trial)
        elif may_try:
            change = self._propose(batch_sizes)
        if change:
            self._trial = change if change.outcome == TRIED else None
            self._sizes_before = dict(batch_sizes)
            self._watch()
        return change

    def _propose(self, batch_sizes: Mapping[int, int]) -> Change | None:
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
            step_s = {rank: mean_without_longest([step[rank] for step in steps]) for rank in sizes}
            slowest = max(step_s, key=lambda rank: step_s[rank])
            slowdown = step_s[slowest] / balanced_s(sizes, step_s)
            error = standard_error([step[slowest] / balanced_s(sizes, step) for step in steps])
            speeds = {rank: size / max(1e-9, step_s[rank]) for rank, size in sizes.items()}
            scale = self._choose_scale(slowest, slowdown)
            suggested = apportion(total, speeds, self._limits)
            better = apportion(
                total,
                {rank: size + scale * (suggested[rank] - size) for rank, size in sizes.items()},
                self._limits,
            )
            # Where a limit binds, balance is out of reach, and there may be nothing to gain.
            saved_s = step_s[slowest] - max(size / speeds[rank] for rank, size in better.items())
            before = self._durations[-window:]
            # What a trial cannot show is not tried.
            least_gain = max(MIN_GAIN, CERTAIN * standard_error(before))
            if slowdown > 1 + CERTAIN * error and saved_s > least_gain * fmean(before):
                self._durations_before = before
                return Change({**batch_sizes, **better}, TRIED, slowest, slowdown, scale)
        return None

    def _choose_scale(self, slowest: int, slowdown: float) -> float:
        """Return which share of a change to try: less than 1, and at last 0, if a similar one has failed."""
        failed = self._failed
        if failed is None or failed.slowest != slowest:
            return 1.0
        is_new = abs(slowdown - failed.slowdown) > NEW * (failed.slowdown - 1)
        return 1.0 if is_new else failed.scale / 2 if failed.scale > MIN_SCALE else 0.0

    def _judge(self, trial: Change) -> Change | None:
        """Return the outcome of a trial. None: it goes on."""
        before, after = self._durations_before, self._durations
        if len(after) < MIN_STEPS and not (len(after) > 1 and min(after) > max(before)):
            return None
        before_s, after_s = mean_without_longest(before), mean_without_longest(after)
        gain, error = 1 - after_s / before_s, math.hypot(standard_error(before), standard_error(after))
        is_open = -LIKELY * error <= gain <= CERTAIN * error  # a loss ends a trial earlier than a gain
        if len(after) >= MIN_STEPS and is_open and len(after) < MAX_STEPS:
            return None
        if gain > LIKELY * error:
            self._failed = None
            return replace(trial, outcome=KEPT, gain=gain)
        self._failed = trial
        self._lost_s += max(0.0, after_s - before_s) * self._num_watched
        return replace(trial, batch_sizes=self._sizes_before, outcome=TAKEN_BACK, gain=gain)


def balanced_s(sizes: Mapping[int, int], step_s: Mapping[int, float]) -> float:
    """Return the seconds of a step in which all ranks compute equally long, at their speeds in `step_s`."""
    return sum(sizes.values()) / sum(size / max(1e-9, step_s[rank]) for rank, size in sizes.items())


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
