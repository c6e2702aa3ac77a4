"""Fits of step times and of sums."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.perfmodel.prediction import CollectiveCost, StepTime
from csdctl.tuning.fleet_model import fit_collective, fit_step_time
from csdctl.tuning.measurements import CollectiveMeasurement, Point

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


def test_one_size_gives_a_line_through_the_origin_and_shorter_steps_still_a_step_time() -> None:
    found = fit_step_time([Point(16, 0.4), Point(16, 0.4)])
    assert (found.fixed_s, found.per_sample_s) == (0.0, pytest.approx(0.025))
    assert fit_step_time([Point(16, 0.5), Point(32, 0.3)]).per_sample_s > 0


PLACES = [(ranks, size) for ranks in (2, 5) for size in (1 << 16, 1 << 20, 1 << 23)]


def timed(cost: CollectiveCost, name: str = "star", factor: float = 1.0) -> list[CollectiveMeasurement]:
    return [
        CollectiveMeasurement(name, ranks, size, factor * cost.at(size, ranks), 0.0) for ranks, size in PLACES
    ]


@given(
    fixed_s=st.floats(1e-5, 1e-2),
    per_rank_s=st.floats(0, 1e-3),
    per_byte_s=st.floats(1e-10, 1e-8),
    per_rank_byte_s=st.floats(0, 1e-8),
)
def test_cost_is_found_from_exact_sums(
    fixed_s: float, per_rank_s: float, per_byte_s: float, per_rank_byte_s: float
) -> None:
    cost = CollectiveCost(fixed_s, per_rank_s, per_byte_s, per_rank_byte_s)
    found = fit_collective(timed(cost))
    for ranks, size in [*PLACES, (9, 10_000_000)]:
        assert found.at(size, ranks) == pytest.approx(cost.at(size, ranks), rel=0.02)


COST = CollectiveCost(0.001, 0.0, 1e-9, 1e-9)
NEWER = [replace(measurement, measured_at=1.0) for measurement in timed(COST)]
ALONE = CollectiveMeasurement("star", 1, 1 << 20, 0.0, 0.0)


@pytest.mark.parametrize(
    "measured",
    [
        [*timed(COST, "allreduce", 3.0), *timed(COST)],  # the faster of two collectives counts
        [*timed(COST), *timed(COST, factor=0.2), *timed(COST)],  # one lucky sum does not
        [*(NEWER * 5), *(timed(COST, factor=0.2) * 20)],  # the network has become slower
        [*timed(COST), ALONE],
    ],
)
def test_sums_that_count(measured: list[CollectiveMeasurement]) -> None:
    found = fit_collective(measured)
    assert found.at(1 << 20, 5) == pytest.approx(COST.at(1 << 20, 5), rel=0.01)


def test_noise_gives_no_negative_time_and_no_sums_none() -> None:
    noisy = [
        CollectiveMeasurement("star", 2, 1 << 16, 0.004, 0.0),
        CollectiveMeasurement("star", 5, 1 << 23, 0.001, 0.0),
    ]
    found = fit_collective(noisy)
    assert min(found.at(1 << 10, 2), found.at(1 << 26, 40)) >= 0
    assert fit_collective([]) == CollectiveCost()
