"""Numbers as text: every number that a node may report has one."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.reporting.numbers import (
    format_accuracy,
    format_bytes,
    format_date,
    format_joules,
    format_loss,
    format_rate,
    format_seconds,
    format_share,
)

FORMATS = [
    format_accuracy,
    format_bytes,
    format_date,
    format_joules,
    format_loss,
    format_rate,
    format_seconds,
    format_share,
]
NUMBERS = st.one_of(st.floats(), st.integers(), st.integers(min_value=10**308, max_value=10**320))


@pytest.mark.parametrize("format_number", FORMATS)
@given(number=NUMBERS)
def test_every_number_is_formatted(format_number: Callable[[float], str], number: float) -> None:
    shown = format_number(number)
    assert shown
    assert len(shown) < 500


@pytest.mark.parametrize("format_number", FORMATS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 10**400, -(10**400)])
def test_number_without_bounds_is_formatted(format_number: Callable[[float], str], number: float) -> None:
    assert len(format_number(number)) < 20
