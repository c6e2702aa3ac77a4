"""Batch sizes that follow the ranks' speeds while a run goes on; pure.

Every rank sees the same times (they travel with the gradient) and so comes to the same batch sizes. The
global batch stays as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """A way to look at the steps that went by: over how many, for how long, and what is worth a change."""

    min_steps: int
    min_duration_s: float
    """A machine held to a share of a core works in bursts of a tenth of a second."""
    dead_band: float
    """How much longer than a balanced step the slowest rank may take."""
    times: int
    """How often in a row the same rank must be the slowest."""


URGENT = Window(5, 4.0, 0.3, 1)
SOON = Window(5, 4.0, 0.1, 2)
FINE = Window(15, 15.0, 0.025, 1)
"""Small imbalance is certain only after many steps, and then it is gain for the rest of the run."""
WINDOWS = (URGENT, SOON, FINE)
GRAIN_S = 0.02
"""A step's time is no better known than this: a machine that is held to a share of a core, or is busy, gives
time in portions, and one that has waited has a portion ready. Short steps are moved only for much."""


class Balancer:
    """Watches the compute time of every rank and says when batch sizes should move."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        """`limits`: the largest batch size of each rank (its memory)."""
        self._limits = dict(limits)
        self.forget()

    def forget(self) -> None:
        """Begin anew: batch sizes or members have changed."""
        self._has_skipped = False
        self._times: dict[Window, list[dict[int, float]]] = {look: [] for look in WINDOWS}
        self._suspects: dict[Window, list[int]] = {look: [] for look in WINDOWS}
        self._slowest = (0, 1.0)

    def observe(self, times_s: Mapping[int, float]) -> None:
        """Take in the compute seconds of one full step, by rank; the first after a change does not count."""
        if not self._has_skipped:
            self._has_skipped = True
            return
        for steps in self._times.values():
            steps.append(dict(times_s))

    def propose(self, batch_sizes: Mapping[int, int]) -> dict[int, int] | None:
        """Better batch sizes with the same sum, or None when they are good as they are, or not known yet.

        A rank that sits out, with batch size 0, goes on to.
        """
        training = {rank: size for rank, size in batch_sizes.items() if size}
        found = self._propose(training)
        return None if found is None else {**dict.fromkeys(batch_sizes, 0), **found}

    def _propose(self, batch_sizes: Mapping[int, int]) -> dict[int, int] | None:
        for look, steps in self._times.items():
            longest_s = max((sum(step[rank] for step in steps) for rank in batch_sizes), default=0.0)
            if len(steps) < look.min_steps or longest_s < look.min_duration_s:
                continue
            step_s = {
                rank: max(1e-9, mean_without_longest([step[rank] for step in steps])) for rank in batch_sizes
            }
            steps.clear()
            sizes = self._better(look, batch_sizes, step_s)
            if sizes is not None:
                return sizes
        return None

    def _better(
        self, look: Window, batch_sizes: Mapping[int, int], step_s: Mapping[int, float]
    ) -> dict[int, int] | None:
        speeds = {rank: size / step_s[rank] for rank, size in batch_sizes.items()}
        total = sum(batch_sizes.values())
        slowest = max(step_s, key=lambda rank: step_s[rank])
        self._slowest = slowest, step_s[slowest] * sum(speeds.values()) / total
        suspects = self._suspects[look]
        grain = GRAIN_S * sum(speeds.values()) / total
        if self._slowest[1] <= 1 + look.dead_band + grain:
            suspects.clear()
            return None
        suspects.append(slowest)
        if suspects[-look.times :] != [slowest] * look.times:
            return None
        sizes = apportion(total, speeds, self._limits)
        # Where a limit holds somebody back, balance is out of reach, and nothing more is gained.
        gain = step_s[slowest] / max(size / speeds[rank] for rank, size in sizes.items())
        return sizes if gain > 1 + look.dead_band / 2 and sizes != dict(batch_sizes) else None

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank that took longest at the last look, and its time over that of a balanced step."""
        return self._slowest


def apportion(total: int, speeds: Mapping[int, float], limits: Mapping[int, int]) -> dict[int, int]:
    """`total` samples over the ranks in proportion to their speeds, at least 1 each, none above its limit.

    When the limits together are below `total` they are exceeded: the global batch is what counts.
    """
    sizes: dict[int, int] = {}
    open_ranks, left = dict(speeds), total
    while open_ranks:
        whole = sum(open_ranks.values())
        full = [
            rank
            for rank, speed in open_ranks.items()
            if rank in limits and left * speed / whole > limits[rank]
        ]
        if not full or len(full) == len(open_ranks):
            break
        for rank in full:
            sizes[rank] = limits[rank]
            left -= limits[rank]
            del open_ranks[rank]
    whole = sum(open_ranks.values())
    exact = {rank: left * speed / whole for rank, speed in open_ranks.items()}
    sizes |= {rank: max(1, int(size)) for rank, size in exact.items()}
    by_remainder = sorted(open_ranks, key=lambda rank: (sizes[rank] - exact[rank], rank))
    while (missing := total - sum(sizes.values())) != 0:
        for rank in by_remainder if missing > 0 else sorted(sizes, key=lambda rank: -sizes[rank]):
            if missing == 0:
                break
            if missing < 0 and sizes[rank] == 1:
                continue
            sizes[rank] += 1 if missing > 0 else -1
            missing += -1 if missing > 0 else 1
    return dict(sorted(sizes.items()))


def mean_without_longest(times_s: list[float]) -> float:
    """The mean step; the longest one does not count: one slow step is no slow node."""
    if len(times_s) < URGENT.min_steps:
        return sum(times_s) / len(times_s)
    return (sum(times_s) - max(times_s)) / (len(times_s) - 1)
