"""What tuning recalls of earlier measurements."""

from dataclasses import replace

import pytest

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import StepTime
from csdctl.runs.measurements import PROBE, MeasurementStore
from csdctl.tuning.fleet_model import ClassModel
from csdctl.tuning.measurements import ProbeMeasurement
from csdctl.workflows.tune.fleet_measurements import hash_recipe
from tests.unit.workflows.measured_project import (
    OVERHEAD_FACTOR,
    PUBLIC,
    SUMS,
    MeasuredProject,
    class_of,
    measurements_of,
    remember_probes,
    remember_trial,
    settings_of,
)

LINE = StepTime(0.1, 0.01)
EIGHT = settings_of(HOST_NAME)


def remember(at: MeasuredProject, *probes: ProbeMeasurement) -> None:
    store = MeasurementStore(at.project.measurements)
    store.add(PROBE, class_of(HOST_NAME), probes, at.features, hash_recipe(at.job, PUBLIC))


def recalled(at: MeasuredProject) -> ClassModel:
    """The host's class, as it is known now."""
    return measurements_of(at).recall_fleet().classes[HOST_NAME]


def probed(size: int, peak: int = 1 << 30) -> ProbeMeasurement:
    return ProbeMeasurement(size, LINE.at(size), peak, settings=EIGHT, measured_at=1.0)


def tried(size: int, ratio: float) -> ProbeMeasurement:
    return ProbeMeasurement(size, LINE.at(size) * ratio, None, settings=EIGHT, measured_at=2.0)


def test_trial_scales_the_probed_step_times(at: MeasuredProject) -> None:
    remember(at, *map(probed, (8, 16, 32)), tried(64, 1.3))
    members = recalled(at)
    assert members.sizes == {8, 16, 32}
    assert members.step_time().at(20) == pytest.approx(LINE.at(20) * 1.3)


def test_size_that_did_not_fit_may_fit_later(at: MeasuredProject) -> None:
    remember(at, probed(8), ProbeMeasurement(32, None, settings=EIGHT, measured_at=1.0))
    assert recalled(at).too_large == 32
    remember(at, probed(40))
    assert recalled(at).too_large is None


def test_size_below_the_largest_has_no_peak_of_its_own(at: MeasuredProject) -> None:
    remember(at, probed(32), probed(20, peak=0), probed(64, peak=2 << 30))
    assert recalled(at).peaks == {32: 1 << 30, 64: 2 << 30}


def test_trial_in_micro_batches_does_not_show_what_fits_at_once(at: MeasuredProject) -> None:
    remember(at, *(probed(size, peak=size << 27) for size in (32, 64)), tried(4000, 1.0))
    most = recalled(at).max_at_once
    assert most is not None
    assert 64 < most < 4000


def test_host_that_did_not_train_takes_part_in_the_sum_of_the_newest_trial(at: MeasuredProject) -> None:
    remember_probes(at)
    remember_trial(at, (0, 16, 16))
    measurements = measurements_of(at, is_host_training=False)
    model = replace(measurements.recall_fleet(), collective_cost=SUMS)
    assert measurements.recall_overhead(model) == pytest.approx(OVERHEAD_FACTOR)
