"""Earlier probes and trials as the start of a new tuning."""

import pytest

from csdctl.perfmodel.prediction import StepTime
from csdctl.tuning.fleet_model import ClassModel, recall_class, recall_in_step
from csdctl.tuning.measurements import ProbeMeasurement
from csdctl.worker.protocol.run_spec import Runtime

SETTINGS = Runtime(2)
LINE = StepTime(0.1, 0.01)


def probed(*sizes: int, settings: Runtime = SETTINGS) -> list[ProbeMeasurement]:
    return [ProbeMeasurement(settings, size, 1.0, LINE.at(size), 3, 1 << 20) for size in sizes]


def tried(size: int, ratio: float, measured_at: float) -> ProbeMeasurement:
    return ProbeMeasurement(SETTINGS, size, measured_at, LINE.at(size) * ratio, 3)


@pytest.mark.parametrize(("threads", "settings", "sizes"), [(0, SETTINGS, {8, 16}), (1, Runtime(1), {64})])
def test_settings_are_those_of_the_newest_trial_unless_the_user_has_set_threads(
    threads: int, settings: Runtime, sizes: set[int]
) -> None:
    known = [*probed(8, 16), *probed(64, settings=Runtime(1)), tried(32, 1.0, 5.0)]
    recalled = recall_class(ClassModel(("a",), Runtime(1)), known, threads)
    assert (recalled.settings, recalled.sizes) == (settings, sizes)


def test_newest_trial_in_which_the_machine_trained_gives_the_in_step_factor() -> None:
    known = [*probed(8, 16), tried(32, 2.0, 5.0), *(tried(32, ratio, 9.0) for ratio in (1.1, 1.2, 1.6))]
    assert recall_in_step(known, LINE) == (32, pytest.approx(1.2))
    assert recall_in_step(probed(8), LINE) is None
    assert recall_in_step([ProbeMeasurement(SETTINGS, 0, 9.0, 0.01, 3)], LINE) is None
