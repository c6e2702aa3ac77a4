"""Batch sizes that adapt to the ranks' speeds during a run. Pure.

Every rank sees the same times (they are sent with the gradient), so every rank makes the same decision. The
global batch size stays constant.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from csdctl.worker.group.values import MAX_STEP_S

MIN_STEPS = 5
"""Steps that show an imbalance."""
TIME_RESOLUTION_S = 0.02
"""The resolution of a step's time. Schedulers assign the CPU in slices, and a rank that has waited has one
left, also for its part of a sum. Steps of 85 ms took 7% longer when smaller imbalances were corrected."""


@dataclass(frozen=True)
class Window:
    """A window of past steps, and the imbalance within it that justifies new batch sizes."""

    min_steps: int
    min_duration_s: float
    """Minimum time of the slowest rank: a machine limited to a share of a core works in bursts of 0.1 s."""
    tolerance: float
    """Share of a balanced step by which the slowest rank may take longer."""
    num_in_a_row: int
    """Number of windows in a row that must have the same slowest rank."""


class Balancer:
    """Watches the compute time of every rank, and proposes other batch sizes."""

    WINDOWS = (Window(MIN_STEPS, 4.0, 0.3, 1), Window(MIN_STEPS, 4.0, 0.1, 2), Window(15, 15.0, 0.025, 1))
    """For large, medium and small imbalances. A small one is certain only after many steps."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        """`limits`: the largest batch size that fits into the memory of each rank."""
        self._limits = dict(limits)
        self.forget()

    def forget(self) -> None:
        """Start again: batch sizes or the ranks that take part have changed."""
        self._has_skipped = False
        self._times: dict[Window, list[dict[int, float]]] = {window: [] for window in self.WINDOWS}
        self._suspects: dict[Window, list[int]] = {window: [] for window in self.WINDOWS}
        self.slowest = (0, 1.0)
        """The slowest rank of the last window, and its time relative to a balanced step."""

    def observe(self, times_s: Mapping[int, float]) -> None:
        """Add the compute seconds of one full step, by rank. The first step after a change does not count.

        A step with an impossible time does not count either, whichever rank sent it.
        """
        if not self._has_skipped:
            self._has_skipped = True
            return
        if not all(0 <= seconds <= MAX_STEP_S for seconds in times_s.values()):  # NaN neither
            return
        for steps in self._times.values():
            steps.append(dict(times_s))

    def propose(self, batch_sizes: Mapping[int, int]) -> dict[int, int] | None:
        """Return better batch sizes with the same sum. None when balanced, or too early to decide.

        A rank with batch size 0 keeps it.
        """
        training = {rank: size for rank, size in batch_sizes.items() if size}
        for window, steps in self._times.items():
            longest_s = max((sum(step[rank] for step in steps) for rank in training), default=0.0)
            if len(steps) < window.min_steps or longest_s < window.min_duration_s:
                continue
            step_s = {
                rank: max(1e-9, mean_without_longest([step[rank] for step in steps])) for rank in training
            }
            steps.clear()
            sizes = self._better(window, training, step_s)
            if sizes is not None:
                return {**dict.fromkeys(batch_sizes, 0), **sizes}
        return None

    def _better(
        self, window: Window, batch_sizes: Mapping[int, int], step_s: Mapping[int, float]
    ) -> dict[int, int] | None:
        speeds = {rank: size / step_s[rank] for rank, size in batch_sizes.items()}
        total = sum(batch_sizes.values())
        slowest = max(step_s, key=lambda rank: step_s[rank])
        self.slowest = slowest, step_s[slowest] * sum(speeds.values()) / total
        suspects = self._suspects[window]
        resolution = TIME_RESOLUTION_S * sum(speeds.values()) / total
        if self.slowest[1] <= 1 + window.tolerance + resolution:
            suspects.clear()
            return None
        suspects.append(slowest)
        if suspects[-window.num_in_a_row :] != [slowest] * window.num_in_a_row:
            return None
        sizes = apportion(total, speeds, self._limits)
        # Where a limit binds, balance is out of reach, and there may be nothing to gain.
        gain = step_s[slowest] / max(size / speeds[rank] for rank, size in sizes.items())
        return sizes if gain > 1 + window.tolerance / 2 and sizes != dict(batch_sizes) else None


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


def mean_without_longest(times_s: list[float]) -> float:
    """Return the mean time without the longest step: one slow step does not make a slow node."""
    kept = sorted(times_s)[: -1 if len(times_s) >= MIN_STEPS else None]
    return sum(kept) / len(kept)
