"""Which rank held the others back, since when, and why; pure.

In a synchronous step, all ranks wait for the slowest, and the slowest for none. So the rank that waits least,
while the others wait, holds them back in that interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from csdctl.reporting.series import COMMUNICATION, COMPUTE, INPUT, WAIT, RunSeries

MIN_SHARE = 0.05
"""Of all time that ranks spent; less waiting than that is nobody's fault."""
MOSTLY = 0.5
LATEST, MIN_LATEST = 0.25, 4
"""Of the run's intervals: the share that is now, and at least so many."""
SLOWER = 1.15
"""Compute time per sample over its own at the beginning."""
HOT_C = 80.0
FULL = 0.95
"""Of the memory that a machine may use."""
BY_COMPUTE, BY_INPUT, BY_LINK, BY_MEMORY, BY_HEAT = "compute", "input", "link", "memory", "heat"


@dataclass(frozen=True)
class Bottleneck:
    """What held the ranks back."""

    rank: int | None
    """None where the ranks' own times cannot tell whose link it is."""
    cause: str
    since_s: float
    """Seconds after the start of the run."""
    lost_s: float
    """Time that each of the others lost, in the median."""
    text: str
    why: str = ""
    """What shows the cause."""


def find_bottleneck(
    series: RunSeries, memory_shares: Mapping[int, float] | None = None, *, is_now: bool = False
) -> Bottleneck | None:
    """Return the rank that held the others back most; None where none did, or it was not recorded.

    `memory_shares`: by rank, of what the machine may use, at most. With `is_now`, only the latest part of the
    run counts: who holds the others back now, and since when.
    """
    if not series.is_wait_divided or len(series.nodes) < 2 or not series.num_intervals:
        return None
    latest = max(MIN_LATEST, round(LATEST * series.num_intervals))
    first = max(0, series.num_intervals - latest) if is_now else 0
    spent = sum(sum(seconds[first:]) for kinds in series.spent_s for seconds in kinds.values())
    communication_s = [sum(kinds[COMMUNICATION][first:]) for kinds in series.spent_s]
    holders = [_holder(series, number) for number in range(series.num_intervals)]
    lost_s = {
        rank: sum(lost for holder, lost in holders[first:] if holder == rank)
        for rank in range(len(series.nodes))
    }
    rank = max(lost_s, key=lambda number: lost_s[number])
    shared_s = median(communication_s)
    if max(lost_s[rank], shared_s) * len(series.nodes) < MIN_SHARE * spent:
        return None
    if shared_s > lost_s[rank]:
        why = f"communication took {shared_s:.1f} s of each rank, more than waiting for any other rank"
        return Bottleneck(None, BY_LINK, 0.0, shared_s, why, why)
    start = _since([lost if holder == rank else 0.0 for holder, lost in holders], first)
    cause, why = _cause(series, rank, start, memory_shares or {})
    text = f"{series.nodes[rank]} (rank {rank}) held the others back for {lost_s[rank]:.1f} s: {why}"
    return Bottleneck(rank, cause, start * series.interval_s, lost_s[rank], text, why)


def _holder(series: RunSeries, number: int) -> tuple[int | None, float]:
    """Return who held the others back in an interval, and the seconds that they waited for it."""
    active = {
        rank: kinds[WAIT][number]
        for rank, kinds in enumerate(series.spent_s)
        if kinds[COMPUTE][number] + kinds[INPUT][number] > 0
    }
    if len(active) < 2:
        return None, 0.0
    rank = min(active, key=lambda number: active[number])
    lost_s = median(waited for other, waited in active.items() if other != rank) - active[rank]
    return (rank, lost_s) if lost_s > 0 else (None, 0.0)


def _since(lost_s: Sequence[float], first: int) -> int:
    """Return the interval from which on the most was lost that is above half of the mean since `first`.

    `lost_s`: what one rank cost the others in each interval. Small differences of a balanced time before do
    not count.
    """
    usual_s = sum(lost_s[first:]) / max(1, len(lost_s) - first) / 2
    start, most, above_s = first, 0.0, 0.0
    for number in reversed(range(len(lost_s))):
        above_s += lost_s[number] - usual_s
        if above_s > most:
            start, most = number, above_s
    return start


def _cause(
    series: RunSeries,
    rank: int,
    start: int,
    memory_shares: Mapping[int, float],
) -> tuple[str, str]:
    """Return the cause, and what shows it."""
    spent = series.spent_s[rank]
    input_s, compute_s = sum(spent[INPUT][start:]), sum(spent[COMPUTE][start:])
    if input_s > MOSTLY * (input_s + compute_s):
        return BY_INPUT, f"reading samples took {input_s / (input_s + compute_s):.0%} of its own time"
    slowdown = _slowdown(series, rank)
    grew = f"its time per sample became {slowdown:.2f} times that of the beginning"
    hottest = max(series.temperatures_c.get(rank, ()), default=0.0)
    if slowdown >= SLOWER and hottest >= HOT_C:
        return BY_HEAT, f"{grew}, at up to {hottest:.0f} °C"
    if memory_shares.get(rank, 0.0) >= FULL:
        return BY_MEMORY, f"it used {memory_shares[rank]:.0%} of its memory"
    if slowdown >= SLOWER:
        return BY_COMPUTE, grew
    return BY_COMPUTE, "its batch takes longer than those of the others; a smaller one would balance them"


def _slowdown(series: RunSeries, rank: int) -> float:
    """Return the compute time per sample of the last quarter over that of the first."""
    compute_s, samples = series.spent_s[rank][COMPUTE], series.samples[rank]
    times = [s / count for s, count in zip(compute_s, samples, strict=True) if count > 0]
    quarter = max(1, len(times) // 4)
    first, last = median(times[:quarter] or [0.0]), median(times[-quarter:] or [0.0])
    return last / first if first else 1.0
