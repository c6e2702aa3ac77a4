"""The properties of a model, and the errors of forecasts."""

import math
from dataclasses import replace
from random import Random

import pytest

from csdctl.perfmodel.spread import Spread, quantile_95
from csdctl.tuning import measurements
from csdctl.tuning.fleet_model import TrialResult
from csdctl.tuning.measurements import ForecastErrors, ModelProperties, TrialMeasurement, compare_trials
from csdctl.tuning.plan_choice import confirmed_prediction
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.recipe import BF16, Recipe
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.worker.protocol.statistics import standard_error


def test_features_are_those_of_the_model_that_was_built() -> None:
    info = ModelInfo("keras.applications:MobileNetV2", {"": (64, 64, 3)}, 7, 5, num_operations=9)
    described = measurements.describe_model(info, "hash")
    assert described == ModelProperties("hash", info.name, 20)
    halved = replace(info, recipe=Recipe(compression=BF16))
    assert measurements.describe_model(halved, "hash").vector_bytes == 10


def trial(samples_per_s: float, batch_size: int = 4, predicted: float | None = None) -> TrialMeasurement:
    ranks = (measurements.TrialRank("class", batch_size, Runtime(1)),)
    return TrialMeasurement(ranks, 1.0, samples_per_s, 0.0, predicted)


def test_errors_are_those_of_new_plans_and_of_repeated_ones() -> None:
    errors = compare_trials(
        [
            trial(100.0, predicted=200.0),  # of a model that no trial had corrected
            trial(110.0, predicted=100.0),
            trial(50.0, batch_size=8, predicted=40.0),
            trial(99.0, predicted=110.0),
        ]
    )
    assert errors.tried == pytest.approx([math.log(1.1), math.log(0.9)])
    assert errors.modelled == pytest.approx([math.log(1.25)])
    assert errors.spread.variance > errors.after_trial(0.0).variance
    upper = [ForecastErrors().after_trial(error).range_of(1.0)[1] for error in (0.0, 0.05)]
    assert upper[0] < upper[1]


@pytest.mark.parametrize("drift", [0.02, 0.06])
def test_range_of_a_plan_holds_nine_of_ten_runs(drift: float) -> None:
    """Machines whose speed differs from day to day by `drift`: a trial a day, then a run on another one.

    Besides, the mean steps of a trial's ten reports differ by 3%.
    """
    random, trials, hits, num_days = Random(3), list[TrialMeasurement](), 0, 400
    for _ in range(num_days):
        today_s = 0.1 * math.exp(random.gauss(0.0, drift))
        reports = [today_s * (1 + random.gauss(0.0, 0.03)) for _ in range(10)]
        step_s, error = sum(reports) / 10, standard_error(reports)
        result = TrialResult(step_s, 4 / step_s, (step_s,), 0.0, error=error)
        predicted = confirmed_prediction([4], result, compare_trials(trials[-50:]), None)
        assert predicted.samples_per_s_range
        low, high = predicted.samples_per_s_range
        hits += low <= 40.0 * math.exp(random.gauss(0.0, drift)) <= high
        trials.append(trial(4 / step_s))
    assert 0.85 <= hits / num_days <= 0.95


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
