"""Memory needed by a batch size, extrapolated from the peaks of smaller batch sizes; pure."""

from collections.abc import Mapping

RANK_SHARE = 0.9
"""The share of a machine's usable memory that a rank's predicted peak may take."""
SPREAD = 2.0
"""Two sizes that differ by less than this factor show noise rather than the cost of a sample."""


def rank_memory_bytes(usable_bytes: int | None) -> int | None:
    """Return the part of a machine's usable memory that a rank may use; None: unknown."""
    return int(usable_bytes * RANK_SHARE) if usable_bytes else None


def merge_peaks(peaks: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
    """Return the larger peak for each batch size."""
    return {**peaks, **{size: max(peak, peaks.get(size, 0)) for size, peak in more.items()}}


def predict_peak_bytes(peaks: Mapping[int, int], batch_size: int) -> int | None:
    """Extrapolate the peak at `batch_size` from the largest size and the largest size up to half of it.

    `peaks` maps batch size to peak memory in bytes. Return None with fewer than two sizes. A smaller size
    gets the peak of the largest: the peak memory of a process never falls.
    """
    if batch_size in peaks:
        return peaks[batch_size]
    if len(peaks) < 2:
        return None
    largest, slope = _line(peaks)
    return int(peaks[largest] + max(0.0, slope) * max(0, batch_size - largest))


def largest_within_memory(peaks: Mapping[int, int], memory_bytes: int) -> int | None:
    """Return the largest batch size whose predicted peak is at most `memory_bytes`; None without peaks.

    A peak grows at most in proportion to the batch size; without two sizes, that is assumed.
    """
    if not peaks:
        return None
    largest, slope = _line(peaks) if len(peaks) > 1 else (max(peaks), 0.0)
    if slope <= 0:
        return max(1, largest * memory_bytes // peaks[largest])
    return max(1, int(largest + (memory_bytes - peaks[largest]) / slope))


def _line(peaks: Mapping[int, int]) -> tuple[int, float]:
    """Return the largest batch size, and the bytes per sample between it and a smaller size."""
    largest = max(peaks)
    small = max((size for size in peaks if size * SPREAD <= largest), default=min(peaks))
    return largest, (peaks[largest] - peaks[small]) / (largest - small)
