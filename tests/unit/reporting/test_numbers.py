"""Numbers as text: every number that a node may report has one."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.reporting.numbers import (
    format_bytes,
    format_joules,
    format_loss,
    format_metrics,
    format_rate,
    format_seconds,
    format_share,
)

FORMATS = [format_bytes, format_joules, format_loss, format_rate, format_seconds, format_share]
NUMBERS = st.one_of(st.floats(), st.integers(), st.integers(min_value=10**308, max_value=10**320))


@pytest.mark.parametrize("format_number", FORMATS)
@given(number=NUMBERS)
def test_every_number_is_formatted(format_number: Callable[[float], str], number: float) -> None:
    text = format_number(number)
    assert text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("format_number", "value", "expected"),
    [
        (format_rate, None, "–"),
        (format_rate, 12345.6, "12,346"),
        (format_seconds, 0.25, "250 ms"),
        (format_seconds, 3599.7, "1:00:00"),
        (format_bytes, 6 << 30, "6.0 GiB"),
        (format_bytes, 2000 << 40, "2000.0 TiB"),
        (format_bytes, 127.6 * 1024, "128 KiB"),
        (format_joules, 338_250, "338 kJ"),
        (format_loss, math.nan, "nan"),
        (format_loss, 21.0, "21"),
        (format_loss, 1.0, "1.0000"),
        (partial(format_metrics, 0.5), dict.fromkeys("abc", 7.0), ", accuracy 0.5000, a 7, b 7, …"),
    ],
)
def test_number_has_the_unit_that_fits(
    format_number: Callable[[Any], str], value: Any, expected: str
) -> None:
    assert format_number(value) == expected
