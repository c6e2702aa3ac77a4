"""Values of options: sizes and ages with their units."""

import pytest

from csdctl.cli.parameters import parse_age, parse_size
from csdctl.errors import InputError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("2G", 2 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("64 mb", 64 << 20), ("4096", 4096)],
)
def test_sizes_are_parsed_with_their_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(("text", "age_s"), [("12h", 43_200), ("90d", 7_776_000), ("1.5 w", 907_200)])
def test_ages_are_parsed_with_their_unit(text: str, age_s: float) -> None:
    assert parse_age(text) == age_s


@pytest.mark.parametrize("text", ["", "3Q", "-1G", "2G3", "90"])
def test_value_without_a_known_unit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="expected a number and a unit"):
        parse_age(text)
    if text != "90":
        with pytest.raises(InputError, match="expected a number and a unit"):
            parse_size(text)
