"""How far a forecast may be off: the range that holds the throughput of 9 runs of 10. Pure.

The error of a forecast is the logarithm of the achieved rate over the forecast one. It is taken as normal
with mean 0 and an unknown variance, which has two sources:

- what was seen: n errors e of earlier forecasts of the same kind, and an assumption that counts as much as
  PRIOR_WEIGHT of them: v = (PRIOR_WEIGHT · prior² + Σ e²) / (PRIOR_WEIGHT + n).
- the noise of the trial itself, whose mean step has the relative standard error s: v + s².

With a scaled inverse-χ² prior for the variance, the error then has Student's t distribution with
PRIOR_WEIGHT + n degrees of freedom (Gelman et al., Bayesian Data Analysis, section 3.3 with a known mean).
The range is rate · exp(±t · √(v + s²)), with its 95% quantile t. docs/explanation/tuning.md explains the
sources.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TRIED_SIGMA, MODELLED_SIGMA = 0.045, 0.05
"""Assumed relative error before any was seen: of a plan that was tried, and of a plan that was modelled."""
PRIOR_WEIGHT = 2
"""The assumption counts as much as this number of errors."""
NORMAL_QUANTILE = 1.6448536269514722
"""95% of a normal distribution are below it: 90% are within it on both sides."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """The distribution of the error of a forecast."""

    variance: float
    num_degrees: float

    def range_of(self, rate: float) -> Range:
        """Return the range around a forecast rate."""
        factor = math.exp(quantile_95(self.num_degrees) * math.sqrt(self.variance))
        return rate / factor, rate * factor


def estimate_spread(errors: Sequence[float], prior_sigma: float, trial_error: float = 0.0) -> Spread:
    """Return the spread of a forecast from `errors` of earlier ones, logarithms of ratios.

    `trial_error`: the relative standard error of the trial that the forecast rests on.
    """
    num_degrees = PRIOR_WEIGHT + len(errors)
    variance = (PRIOR_WEIGHT * prior_sigma**2 + sum(error**2 for error in errors)) / num_degrees
    return Spread(variance + trial_error**2, num_degrees)


def quantile_95(num_degrees: float) -> float:
    """Return the 95% quantile of Student's t, to 1.5% from 2 degrees of freedom on.

    The expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5).
    """
    z, n = NORMAL_QUANTILE, num_degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
