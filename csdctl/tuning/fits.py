"""Fit the time of a step and the cost of a sum to measurements; pure.

A probe's error is proportional to its time, so residuals are relative. A single disturbed probe must not
change the fit, so large residuals weigh less (Huber's weights, reweighted until they converge).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from csdctl.perfmodel.prediction import CollectiveCost, StepTime
from csdctl.tuning.measurements import CollectiveMeasurement

Array = Any
"""A NumPy array of float64; NumPy is imported where it computes: `forecast --published` does without it."""

HUBER_K = 1.345
"""Residuals beyond this many standard deviations weigh less; 95% efficient where none is an outlier."""
MIN_SCALE = 0.01
"""Minimum noise for the weights of residuals."""
MAD_TO_SIGMA = 1.4826
NUM_REWEIGHTS = 20


@dataclass(frozen=True)
class Point:
    """One measurement: the mean step of a machine at one batch size."""

    batch_size: int
    step_time_s: float


def fit_step_time(probes: Sequence[Point]) -> StepTime:
    """Fit the step time to `probes` of one machine class; raises ValueError without probes.

    A single batch size gives a line through the origin.
    """
    import numpy as np

    if not probes:
        raise ValueError("no probe to fit a step time to")
    sizes = np.array([float(probe.batch_size) for probe in probes])
    times = np.array([probe.step_time_s for probe in probes])
    line = _fit(np.stack([np.ones_like(sizes), sizes], axis=1), times)
    if len({probe.batch_size for probe in probes}) == 1 or line[1] <= 0:
        # One size does not determine α; steps that get shorter with the batch are noise.
        return StepTime(0.0, _fit(sizes[:, np.newaxis], times)[0])
    return StepTime(line[0], line[1])


def _fit(columns: Array, times: Array) -> list[float]:
    """Return the coefficients ≥ 0 of `columns`."""
    import numpy as np

    weights, fitted = np.ones_like(times), times
    coefficients: list[float] = []
    for _ in range(NUM_REWEIGHTS):
        # Relative to the fit, not to the probe: otherwise fast probes weigh more and the fit is too fast.
        roots = np.sqrt(weights) / fitted
        coefficients = non_negative(columns * roots[:, np.newaxis], times * roots)
        before, fitted = fitted, columns @ np.array(coefficients)
        residuals = times / fitted - 1
        scale = max(MIN_SCALE, MAD_TO_SIGMA * median(np.abs(residuals).tolist()))
        weights = np.minimum(1.0, HUBER_K * scale / np.maximum(np.abs(residuals), 1e-12))
        if np.allclose(before, fitted, rtol=1e-4):
            break
    return coefficients


def non_negative(columns: Array, wanted: Array) -> list[float]:
    """Solve least squares with coefficients ≥ 0: drop the first negative coefficient until none is left."""
    import numpy as np

    kept = list(range(columns.shape[1]))
    while True:
        solved = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)[0]
        negative = [column for column, value in zip(kept, solved, strict=True) if value < 0]
        if not negative:
            coefficients = dict(zip(kept, solved, strict=True))
            return [float(coefficients.get(column, 0.0)) for column in range(columns.shape[1])]
        kept.remove(negative[0])


NUM_NEWEST = 5
"""Number of newest times used per collective: a fleet changes, and a single time may be an outlier."""


def fit_collective(measured: Sequence[CollectiveMeasurement]) -> CollectiveCost:
    """Fit the cost of a sum to `measured`, minimizing relative errors; 0 without measurements.

    With several collectives, only the fastest is used, as in training.
    """
    fastest = _fastest(measured)
    if not fastest:
        return CollectiveCost()
    import numpy as np

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
