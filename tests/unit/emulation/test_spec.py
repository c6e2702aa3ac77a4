import os

import pytest

from csdctl.emulation.fleet import EmulatedSpec, check_spec, parse_size
from csdctl.errors import InputError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("2G", 2 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("64 mb", 64 << 20), ("4096", 4096)],
)
def test_sizes_are_parsed_with_their_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "3Q", "-1G", "2G3", "nan"])
def test_an_invalid_size_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError, match="expected"):
        parse_size(text)


def test_a_fleet_that_cannot_be_emulated_is_an_input_error() -> None:
    check_spec(EmulatedSpec(64, cpu=os.cpu_count() or 1))
    for spec in (
        *(EmulatedSpec(num_nodes) for num_nodes in (0, 65)),
        *(EmulatedSpec(1, cpu=cpu) for cpu in (0, -0.5, float("nan"), (os.cpu_count() or 1) + 1)),
        EmulatedSpec(1, memory_bytes=1),
    ):
        with pytest.raises(InputError, match="received"):
            check_spec(spec)
