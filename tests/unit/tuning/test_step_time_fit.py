import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.fits import Point, fit_step_time

SIZES = (4, 8, 16, 32, 64, 128, 256)

seconds = st.floats(1e-4, 1.0)


def measured(step_time: StepTime, sizes: tuple[int, ...] = SIZES) -> list[Point]:
    return [Point(size, step_time.at(size)) for size in sizes]


@given(fixed_s=st.floats(0, 1.0), per_sample_s=seconds)
def test_line_is_found_from_exact_probes(fixed_s: float, per_sample_s: float) -> None:
    found = fit_step_time(measured(StepTime(fixed_s, per_sample_s)))
    for size in (1, 20, 500):
        assert found.at(size) == pytest.approx(fixed_s + per_sample_s * size, rel=0.02)


def test_one_disturbed_probe_does_not_bend_the_line() -> None:
    line = StepTime(0.02, 0.001)
    points = [*measured(line)[:-1], Point(96, line.at(96) * 3)]
    assert fit_step_time(points).at(64) == pytest.approx(line.at(64), rel=0.1)


def test_one_size_gives_a_line_through_the_origin() -> None:
    found = fit_step_time([Point(16, 0.4), Point(16, 0.4)])
    assert (found.fixed_s, found.per_sample_s) == (0.0, pytest.approx(0.025))


def test_steps_that_get_shorter_with_the_batch_still_give_a_step_time() -> None:
    found = fit_step_time([Point(16, 0.5), Point(32, 0.3)])
    assert found.per_sample_s > 0


def test_fit_without_probes_is_an_error() -> None:
    with pytest.raises(ValueError, match="no probe"):
        fit_step_time([])
