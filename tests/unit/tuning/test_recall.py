"""Earlier probes and trials as the start of a new tuning."""

import pytest

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.fits import Point
from csdctl.tuning.measurements import ProbeMeasurement
from csdctl.tuning.recall import points_with, recall_in_step, recall_points
from csdctl.worker.protocol.run_spec import Runtime

TWO, ONE = Runtime(2), Runtime(1)
LINE = StepTime(0.1, 0.01)


def probed(settings: Runtime, *sizes: int, slower: float = 1.0) -> list[ProbeMeasurement]:
    return [ProbeMeasurement(settings, size, 1.0, LINE.at(size) * slower, 3, 1 << 20) for size in sizes]


def tried(settings: Runtime, size: int, ratio: float, measured_at: float) -> ProbeMeasurement:
    return ProbeMeasurement(settings, size, measured_at, LINE.at(size) * ratio, 3)


def test_points_are_the_probes_that_fitted_in_memory() -> None:
    known = [
        *probed(TWO, 8, 16),
        ProbeMeasurement(TWO, 64, 1.0, None),
        tried(TWO, 32, 1.3, 2.0),
        *probed(ONE, 8),
    ]
    assert points_with(known, TWO) == [Point(8, LINE.at(8)), Point(16, LINE.at(16))]


def test_settings_with_few_probes_use_the_scaled_probes_of_others() -> None:
    known = [*probed(TWO, 8, 16, 64), *probed(ONE, 16, slower=0.5)]
    sizes = {point.batch_size: point.step_time_s for point in recall_points(known, ONE)}
    assert sizes == {size: pytest.approx(LINE.at(size) / 2) for size in (8, 16, 64)}


def test_newest_trial_gives_the_in_step_factor() -> None:
    known = [*probed(TWO, 8, 16), tried(TWO, 32, 2.0, 5.0)]
    known += [tried(TWO, 32, ratio, 9.0) for ratio in (1.1, 1.2, 1.6)]
    assert recall_in_step(known, TWO, LINE) == (32, pytest.approx(1.2))
    assert recall_in_step(known, ONE, LINE) is None


def test_host_that_sat_out_gives_no_in_step_factor() -> None:
    assert recall_in_step([ProbeMeasurement(TWO, 0, 9.0, 0.01, 3)], TWO, LINE) is None
