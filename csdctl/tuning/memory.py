"""How much memory a batch size will take, from the peaks of smaller ones; pure."""

from collections.abc import Mapping


def predict_peak_bytes(peaks: Mapping[int, int], batch_size: int) -> int | None:
    """The straight line through the two largest batch sizes measured, at `batch_size`.

    `peaks` maps batch size to peak memory in bytes. None with fewer than two sizes. A peak never falls,
    because it is the highest mark of one process.
    """
    if batch_size in peaks:
        return peaks[batch_size]
    if len(peaks) < 2:
        return None
    (small, small_peak), (large, large_peak) = sorted(peaks.items())[-2:]
    slope = max(0.0, (large_peak - small_peak) / (large - small))
    return int(large_peak + slope * max(0, batch_size - large))


def largest_fitting(peaks: Mapping[int, int], memory_bytes: int) -> int | None:
    """The largest batch size whose predicted peak is at most `memory_bytes`; None: no end can be told."""
    if len(peaks) < 2:
        return None
    (small, small_peak), (large, large_peak) = sorted(peaks.items())[-2:]
    slope = (large_peak - small_peak) / (large - small)
    if slope <= 0:
        return None
    return max(1, int(large + (memory_bytes - large_peak) / slope))
