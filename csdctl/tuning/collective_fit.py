"""Fit the cost of a sum by bytes and ranks to timed sums: least squares with coefficients ≥ 0; pure."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from csdctl.perfmodel.collective import CollectiveCost
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.step_time_fit import non_negative

NUM_NEWEST = 5
"""The newest times per collective that count: a fleet changes, and a single sum may be lucky."""


def fit_collective(measured: Sequence[CollectiveMeasurement]) -> CollectiveCost:
    """Fit the cost of a sum to `measured`, by relative errors; without measurements it is 0.

    Of several collectives the fastest counts: a training uses that one.
    """
    fastest = _fastest(measured)
    if not fastest:
        return CollectiveCost()
    rows = [[1.0, others := num_ranks - 1, num_bytes, num_bytes * others] for num_ranks, num_bytes in fastest]
    times = np.array(list(fastest.values()))
    columns = np.array(rows, float) / times[:, np.newaxis]
    # Bytes are millions and seconds thousandths: scale each column for numerical stability.
    sizes = np.abs(columns).max(axis=0)
    sizes[sizes == 0] = 1.0
    found = np.array(non_negative(columns / sizes, np.ones_like(times))) / sizes
    return CollectiveCost(*(float(one) for one in found))


def _fastest(measured: Sequence[CollectiveMeasurement]) -> dict[tuple[int, int], float]:
    """Return the seconds of the fastest collective, the median of its newest sums, by ranks and bytes."""
    repeated: dict[tuple[str, int, int], list[float]] = {}
    for one in sorted(measured, key=lambda one: one.measured_at):
        if one.num_ranks > 1 and one.seconds > 0:  # one rank has nothing to sum
            repeated.setdefault((one.name, one.num_ranks, one.num_bytes), []).append(one.seconds)
    fastest: dict[tuple[int, int], float] = {}
    for (_, num_ranks, num_bytes), seconds in repeated.items():
        usual_s = median(seconds[-NUM_NEWEST:])
        place = (num_ranks, num_bytes)
        fastest[place] = min(usual_s, fastest.get(place, usual_s))
    return fastest
