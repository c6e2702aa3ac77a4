"""From timed sums to what a sum costs by bytes and ranks: least squares with coefficients ≥ 0; pure."""

from collections.abc import Sequence

import numpy as np

from csdctl.perfmodel.collective import CollectiveCost
from csdctl.tuning.fit import non_negative
from csdctl.tuning.measured import Collective


def fit_collective(measured: Sequence[Collective]) -> CollectiveCost:
    """The cost that `measured` sums show; no cost at all without any. Errors are shares of a sum's time.

    Of several ways to sum the same, the quickest counts: it is the one that a training takes.
    """
    quickest: dict[tuple[int, int], float] = {}
    for one in measured:
        if one.num_ranks < 2 or one.seconds <= 0:
            continue  # a rank alone sums nothing
        place = (one.num_ranks, one.num_bytes)
        quickest[place] = min(one.seconds, quickest.get(place, one.seconds))
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
