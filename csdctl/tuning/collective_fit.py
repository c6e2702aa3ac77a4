"""From timed sums to what a sum costs by bytes and ranks: least squares with coefficients ≥ 0; pure."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from csdctl.perfmodel.collective import CollectiveCost
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.step_time_fit import non_negative

NUM_NEWEST = 5
"""Of one way to sum, so many of the newest times count: a fleet changes, and one sum may be lucky."""


def fit_collective(measured: Sequence[CollectiveMeasurement]) -> CollectiveCost:
    """The cost that `measured` sums show; no cost at all without any. Errors are shares of a sum's time.

    Of several ways to sum the same, the quickest counts: it is the one that a training takes.
    """
    quickest = _quickest(measured)
    if not quickest:
        return CollectiveCost()
    rows = [
        [1.0, others := num_ranks - 1, num_bytes, num_bytes * others] for num_ranks, num_bytes in quickest
    ]
    times = np.array(list(quickest.values()))
    columns = np.array(rows, float) / times[:, np.newaxis]
    # Bytes are millions and seconds thousandths: each column to its own size, for the arithmetic's sake.
    sizes = np.abs(columns).max(axis=0)
    sizes[sizes == 0] = 1.0
    found = np.array(non_negative(columns / sizes, np.ones_like(times))) / sizes
    return CollectiveCost(*(float(one) for one in found))


def _quickest(measured: Sequence[CollectiveMeasurement]) -> dict[tuple[int, int], float]:
    """Seconds of the quickest way, by ranks and bytes; of each way the median of its newest sums."""
    repeated: dict[tuple[str, int, int], list[float]] = {}
    for one in sorted(measured, key=lambda one: one.measured_at):
        if one.num_ranks > 1 and one.seconds > 0:  # a rank alone sums nothing
            repeated.setdefault((one.name, one.num_ranks, one.num_bytes), []).append(one.seconds)
    quickest: dict[tuple[int, int], float] = {}
    for (_, num_ranks, num_bytes), seconds in repeated.items():
        usual_s = median(seconds[-NUM_NEWEST:])
        place = (num_ranks, num_bytes)
        quickest[place] = min(usual_s, quickest.get(place, usual_s))
    return quickest
