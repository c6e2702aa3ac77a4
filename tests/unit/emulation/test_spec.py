import os

import pytest

from csdctl.emulation.fleet import EmulatedSpec, check_spec, parse_shares
from csdctl.errors import InputError


def test_a_fleet_that_cannot_be_emulated_is_an_input_error() -> None:
    check_spec(EmulatedSpec((os.cpu_count() or 1,) * 64))
    for spec in (
        EmulatedSpec((0.25,) * 65),
        *(EmulatedSpec((0.25, cpu)) for cpu in (0, -0.5, float("nan"), (os.cpu_count() or 1) + 1)),
        EmulatedSpec((0.25,), memory_bytes=1),
    ):
        with pytest.raises(InputError, match="emulated fleet"):
            check_spec(spec)


@pytest.mark.parametrize(
    ("text", "num_nodes", "shares"),
    [
        ("0.25", None, (0.25,) * 4),
        ("0.25", 2, (0.25, 0.25)),
        ("0.5, 0.25,.1", None, (0.5, 0.25, 0.1)),
        ("0.5,0.25,0.1", 3, (0.5, 0.25, 0.1)),
    ],
)
def test_share_of_the_cpu_is_one_for_all_nodes_or_one_for_each(
    text: str, num_nodes: int | None, shares: tuple[float, ...]
) -> None:
    assert parse_shares(text, num_nodes) == shares
    option = EmulatedSpec(shares).cpu_option
    assert parse_shares(option, len(shares)) == shares, "the remedy starts the same fleet"


@pytest.mark.parametrize(
    ("text", "num_nodes", "message"),
    [
        ("0.5,0.25", 3, "received --cpu 0.5,0.25 with 2 values for --nodes 3"),
        ("half", None, "received 'half' as a share of the CPU, expected numbers of cores"),
        ("0.5,", None, "received '0.5,' as a share"),
    ],
)
def test_wrong_number_of_shares_is_an_input_error(text: str, num_nodes: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_shares(text, num_nodes)
