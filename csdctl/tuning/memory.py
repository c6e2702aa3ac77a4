"""How much memory a batch size will take, from the peaks of smaller ones; pure."""

from collections.abc import Mapping

SPREAD = 2.0
"""Sizes closer together than this factor tell more of the noise than of what a sample takes."""


def predict_peak_bytes(peaks: Mapping[int, int], batch_size: int) -> int | None:
    """The straight line through the largest batch size measured and one half as large, at `batch_size`.

    `peaks` maps batch size to peak memory in bytes. None with fewer than two sizes. A peak never falls,
    because it is the highest mark of one process.
    """
    if batch_size in peaks:
        return peaks[batch_size]
    if len(peaks) < 2:
        return None
    largest, slope = _line(peaks)
    return int(peaks[largest] + max(0.0, slope) * max(0, batch_size - largest))


def largest_fitting(peaks: Mapping[int, int], memory_bytes: int) -> int | None:
    """The largest batch size whose predicted peak is at most `memory_bytes`; None: no end can be told."""
    if len(peaks) < 2:
        return None
    largest, slope = _line(peaks)
    if slope <= 0:
        return None
    return max(1, int(largest + (memory_bytes - peaks[largest]) / slope))


def _line(peaks: Mapping[int, int]) -> tuple[int, float]:
    """The largest batch size, and the bytes that each sample took since one at most half as large."""
    largest = max(peaks)
    small = max((size for size in peaks if size * SPREAD <= largest), default=min(peaks))
    return largest, (peaks[largest] - peaks[small]) / (largest - small)
