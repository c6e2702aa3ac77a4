"""The range of a forecast, against simulated runs with known noise."""

import math
from random import Random

import pytest

from csdctl.perfmodel.spread import Spread, quantile_95, standard_error


@pytest.mark.parametrize(
    ("num_degrees", "quantile"),
    [(2, 2.9200), (4, 2.1318), (6, 1.9432), (10, 1.8125), (30, 1.6973), (1e9, 1.6449)],
)
def test_quantiles_are_those_of_tables(num_degrees: float, quantile: float) -> None:
    assert quantile_95(num_degrees) == pytest.approx(quantile, rel=1.5e-2)


def test_range_lies_around_the_rate_on_a_logarithmic_scale() -> None:
    low, high = Spread(0.05**2, 1e9).range_of(200.0)
    assert low * high == pytest.approx(200.0**2)
    assert high == pytest.approx(200.0 * math.exp(1.6449 * 0.05), rel=1e-4)


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
