"""Fit the cost of a sum by bytes and ranks to timed sums: least squares with coefficients ≥ 0; pure."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from csdctl.perfmodel.collective import CollectiveCost
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.step_time_fit import non_negative

NUM_NEWEST = 5
"""Number of newest times used per collective: a fleet changes, and a single time may be an outlier."""


def fit_collective(measured: Sequence[CollectiveMeasurement]) -> CollectiveCost:
    """Fit the cost of a sum to `measured`, minimizing relative errors; 0 without measurements.

    With several collectives, only the fastest is used, as in training.
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
    coefficients = np.array(non_negative(columns / sizes, np.ones_like(times))) / sizes
    return CollectiveCost(*map(float, coefficients))


def _fastest(measured: Sequence[CollectiveMeasurement]) -> dict[tuple[int, int], float]:
    """Return the seconds of the fastest collective, the median of its newest sums, by ranks and bytes."""
    repeated: dict[tuple[str, int, int], list[float]] = {}
    for sample in sorted(measured, key=lambda sample: sample.measured_at):
        if sample.num_ranks > 1 and sample.seconds > 0:  # a single rank has nothing to sum
            repeated.setdefault((sample.name, sample.num_ranks, sample.num_bytes), []).append(sample.seconds)
    fastest: dict[tuple[int, int], float] = {}
    for (_, num_ranks, num_bytes), seconds in repeated.items():
        median_s = median(seconds[-NUM_NEWEST:])
        key = (num_ranks, num_bytes)
        fastest[key] = min(median_s, fastest.get(key, median_s))
    return fastest
