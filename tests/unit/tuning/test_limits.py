import pytest

from csdctl.tuning.search import Limits, default_limits
from csdctl.tuning.stannis import TuningError


def test_global_batch_stays_within_four_reference_batches() -> None:
    assert default_limits(Limits(), 256, 1_000_000, 1).max_global_batch == 1024
    assert default_limits(Limits(), 256, None, 1).max_global_batch == 1024


def test_epoch_keeps_ten_steps() -> None:
    assert default_limits(Limits(), 256, 1_000, 1).max_global_batch == 100


def test_required_ranks_have_a_sample_each() -> None:
    assert default_limits(Limits(), 256, 50, 25).max_global_batch == 25


def test_given_limits_stay_and_a_step_time_gets_a_default_global_batch() -> None:
    for given in (Limits(global_batch=7), Limits(max_global_batch=900)):
        assert default_limits(given, 256, 1_000, 1) == given
    assert default_limits(Limits(max_step_s=1.0), 256, None, 1) == Limits(1024, None, 1.0)


def test_no_global_batch_is_larger_than_an_epoch() -> None:
    assert default_limits(Limits(max_global_batch=5_000), 256, 1_000, 1).max_global_batch == 1_000
    assert default_limits(Limits(global_batch=5_000), 256, None, 1) == Limits(global_batch=5_000)
    with pytest.raises(TuningError, match="5,000 samples exceeds an epoch of 1,000 samples"):
        default_limits(Limits(global_batch=5_000), 256, 1_000, 1)
