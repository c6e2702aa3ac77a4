import pytest

from csdctl.tuning.fleet_model import largest_within_memory, predict_peak_bytes


def test_measured_size_is_not_predicted() -> None:
    assert predict_peak_bytes({8: 100}, 8) == 100
    assert predict_peak_bytes({4: 90, 8: 100, 16: 130}, 8) == 100


@pytest.mark.parametrize("peaks", [{}, {8: 100}])
def test_one_measurement_predicts_nothing(peaks: dict[int, int]) -> None:
    assert predict_peak_bytes(peaks, 16) is None


def test_peak_is_extrapolated_from_the_largest_size_and_half_of_it() -> None:
    assert predict_peak_bytes({4: 99, 16: 130, 8: 100}, 32) == 130 + 16 * 30 // 8


def test_almost_equal_sizes_do_not_set_the_slope() -> None:
    assert predict_peak_bytes({32: 100, 128: 196, 130: 298}, 260) == 298 + 130 * 198 // 98
    assert predict_peak_bytes({100: 200, 110: 210}, 130) == 230


def test_peak_of_a_process_does_not_fall() -> None:
    assert predict_peak_bytes({8: 100, 16: 100}, 1000) == 100
    assert predict_peak_bytes({8: 120, 16: 100}, 1000) == 100
    assert predict_peak_bytes({8: 100, 16: 130}, 12) == 130


@pytest.mark.parametrize("peaks", [{8: 100}, {8: 100, 16: 100}])
def test_memory_grows_in_proportion_without_a_line(peaks: dict[int, int]) -> None:
    assert largest_within_memory(peaks, 250) == max(peaks) * 250 // 100


def test_largest_size_is_where_the_line_meets_the_memory() -> None:
    assert largest_within_memory({8: 100, 16: 180}, 380) == 36
    assert largest_within_memory({}, 380) is None
