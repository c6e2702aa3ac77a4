"""How much memory a batch size will take, from the peaks of smaller ones; pure."""

from collections.abc import Mapping

RANK_SHARE = 0.9
"""Of a machine's usable memory, what a rank's predicted peak may take."""
SPREAD = 2.0
"""Two sizes closer together than this factor tell more of noise than of a sample, and serve in need only."""


def rank_memory_bytes(usable_bytes: int | None) -> int | None:
    """What a rank may fill of a machine's usable memory; None: not known."""
    return int(usable_bytes * RANK_SHARE) if usable_bytes else None


def predict_peak_bytes(peaks: Mapping[int, int], batch_size: int) -> int | None:
    """The line through the largest batch size and the largest at most half of it, at `batch_size`.

    `peaks` maps batch size to peak memory in bytes. None with fewer than two sizes. A smaller size has the
    largest one's peak at most: it is the highest mark of one process, which never falls.
    """
    if batch_size in peaks:
        return peaks[batch_size]
    if len(peaks) < 2:
        return None
    largest, slope = _line(peaks)
    return int(peaks[largest] + max(0.0, slope) * max(0, batch_size - largest))


def largest_fitting(peaks: Mapping[int, int], memory_bytes: int) -> int | None:
    """The largest batch size whose predicted peak is at most `memory_bytes`; None: nothing was measured.

    A peak grows in proportion to the batch size at most, which is what is taken where no line can be drawn.
    """
    if not peaks:
        return None
    largest, slope = _line(peaks) if len(peaks) > 1 else (max(peaks), 0.0)
    if slope <= 0:
        return max(1, largest * memory_bytes // peaks[largest])
    return max(1, int(largest + (memory_bytes - peaks[largest]) / slope))


def _line(peaks: Mapping[int, int]) -> tuple[int, float]:
    """The largest batch size, and the bytes that each sample took since the one to hold it against."""
    largest = max(peaks)
    small = max((size for size in peaks if size * SPREAD <= largest), default=min(peaks))
    return largest, (peaks[largest] - peaks[small]) / (largest - small)
