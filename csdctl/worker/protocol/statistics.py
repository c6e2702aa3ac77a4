"""The uncertainty of a mean of times that follow each other."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean


def standard_error(values: Sequence[float]) -> float:
    """Return the relative standard error of the mean of `values`, in order of time. 0 with less than two.

    Neighbours that resemble each other tell less than independent values. Their correlation widens the error,
    as in an autoregressive process of the first order.
    """
    mean = fmean(values) if values else 0.0
    deviations = [value - mean for value in values]
    total = sum(deviation**2 for deviation in deviations)
    if len(values) < 2 or not total:
        return 0.0
    products = sum(earlier * later for earlier, later in pairwise(deviations))
    correlation = min(max(products / total, 0.0), 0.9)
    variance = total / (len(values) - 1) / len(values) * (1 + correlation) / (1 - correlation)
    return math.sqrt(variance) / mean
