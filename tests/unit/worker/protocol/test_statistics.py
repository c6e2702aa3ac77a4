"""The standard error of a mean of times that follow each other."""

import math
from random import Random

import pytest

from csdctl.worker.protocol.statistics import standard_error


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_standard_error_is_how_far_means_lie_apart(correlation: float) -> None:
    """Also where neighbouring values resemble each other, as in a machine whose clock changes slowly."""
    random = Random(1)

    def values() -> list[float]:
        drawn, last = [], random.gauss(0, 0.1)
        for _ in range(40):
            last = correlation * last + math.sqrt(1 - correlation**2) * random.gauss(0, 0.1)
            drawn.append(2.0 + last)
        return drawn

    trials = [values() for _ in range(1000)]
    means = [sum(drawn) / len(drawn) for drawn in trials]
    true = math.sqrt(sum((mean - 2.0) ** 2 for mean in means) / len(means)) / 2.0
    found = sum(map(standard_error, trials)) / len(trials)
    assert found == pytest.approx(true, rel=0.15)
    assert standard_error([1.0]) == standard_error([]) == standard_error([2.0, 2.0]) == 0.0
