"""Batch sizes that follow the ranks' speeds while a run goes on; pure.

Every rank sees the same times (they travel with the gradient) and so comes to the same batch sizes. The
global batch stays as it is.
"""

from collections.abc import Mapping

MIN_STEPS = 5
"""Steps that are looked at together; the longest of them does not count."""
MIN_DURATION_S = 4.0
"""And for how long at least: a machine held to a share of a core works in bursts of a tenth of a second."""
DEAD_BAND = 0.1
"""How much longer than a balanced step the slowest rank may take before anything is moved."""
URGENT = 0.3
"""From here on once is enough; below, the same rank must be slowest twice in a row."""


class Balancer:
    """Watches the compute time of every rank and says when batch sizes should move."""

    def __init__(
        self,
        limits: Mapping[int, int],
        *,
        min_steps: int = MIN_STEPS,
        min_duration_s: float = MIN_DURATION_S,
        dead_band: float = DEAD_BAND,
    ) -> None:
        """`limits`: the largest batch size of each rank (its memory)."""
        self._limits = dict(limits)
        self._min_steps = min_steps
        self._min_duration_s = min_duration_s
        self._dead_band = dead_band
        self._suspect: int | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew: batch sizes or members have changed."""
        self._times: dict[int, list[float]] = {}
        self._has_skipped = False

    def observe(self, times_s: Mapping[int, float]) -> None:
        """Take in the compute seconds of one full step, by rank; the first after a change does not count."""
        if not self._has_skipped:
            self._has_skipped = True
            return
        for rank, time_s in times_s.items():
            self._times.setdefault(rank, []).append(time_s)

    def propose(self, batch_sizes: Mapping[int, int]) -> dict[int, int] | None:
        """Better batch sizes with the same sum, or None when they are good as they are, or not known yet."""
        times = [self._times.get(rank, []) for rank in batch_sizes]
        if min(map(len, times)) < self._min_steps or max(map(sum, times)) < self._min_duration_s:
            return None
        rank, slowdown = self.slowest(batch_sizes)
        is_due = slowdown > 1 + URGENT or (slowdown > 1 + self._dead_band and rank == self._suspect)
        self._suspect = rank if slowdown > 1 + self._dead_band else None
        step_s = self._step_times(batch_sizes)
        speeds = {rank: size / step_s[rank] for rank, size in batch_sizes.items()}
        sizes = share_out(sum(batch_sizes.values()), speeds, self._limits)
        # Where a limit holds somebody back, balance is out of reach, and nothing more is gained.
        gain = max(step_s.values()) / max(size / speeds[one] for one, size in sizes.items())
        if is_due and gain > 1 + self._dead_band / 2 and sizes != dict(batch_sizes):
            self._suspect = None
            return sizes
        self._times = {}
        return None

    def slowest(self, batch_sizes: Mapping[int, int]) -> tuple[int, float]:
        """The rank that takes longest, and its time over that of a balanced step."""
        step_s = self._step_times(batch_sizes)
        rank = max(step_s, key=lambda one: step_s[one])
        speed = sum(size / step_s[one] for one, size in batch_sizes.items())
        return rank, step_s[rank] * speed / sum(batch_sizes.values())

    def _step_times(self, batch_sizes: Mapping[int, int]) -> dict[int, float]:
        """The mean step of each rank, without the longest one: one slow step is no slow node."""
        return {rank: max(1e-9, _mean_without_longest(self._times[rank])) for rank in batch_sizes}


def share_out(total: int, speeds: Mapping[int, float], limits: Mapping[int, int]) -> dict[int, int]:
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


def _mean_without_longest(times_s: list[float]) -> float:
    if len(times_s) < MIN_STEPS:
        return sum(times_s) / len(times_s)
    return (sum(times_s) - max(times_s)) / (len(times_s) - 1)
