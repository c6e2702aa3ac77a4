import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.errors import InputError
from csdctl.fleet.names import (
    MAX_PATTERN,
    MAX_RANGE,
    count_range,
    expand_range,
    fold_names,
    fold_rows,
    format_node_names,
    range_ends,
)

NAMES = st.from_regex(r"(csd|r0-n|[a-z]{0,2})([0-9]{1,3})?(\.lan|x)?", fullmatch=True).filter(bool)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["csd0", "csd1", "csd2"], ["csd[0-2]"]),
        (["csd2", "csd0", "csd1"], ["csd[0-2]"]),
        (["csd9", "csd10", "csd11"], ["csd[9-11]"]),
        (["csd08", "csd09", "csd10"], ["csd[08-10]"]),
        (["csd0", "csd1", "csd5", "jetson"], ["csd[0-1]", "csd5", "jetson"]),
        (["n1.lan", "n2.lan", "n1", "n2"], ["n[1-2].lan", "n[1-2]"]),
        (["rack1-n1", "rack1-n2", "rack2-n1"], ["rack1-n[1-2]", "rack2-n1"]),
        (["csd1", "csd1"], ["csd1"]),
        (["x", "0x"], ["x", "0x"]),
        ([], []),
    ],
)
def test_names_are_folded(names: list[str], folded: list[str]) -> None:
    assert fold_names(names) == folded


@given(st.lists(st.tuples(NAMES, NAMES), max_size=30))
def test_folded_rows_expand_to_the_same_rows_in_their_order(rows: list[tuple[str, str]]) -> None:
    expanded = [
        row
        for name, address in fold_rows(rows)
        for row in zip(expand_range(name), expand_range(address), strict=True)
    ]
    assert expanded == rows


def test_message_has_up_to_three_names_or_a_bounded_number_of_ranges() -> None:
    assert format_node_names(["csd0", "csd1", "csd2", "csd1"]) == "csd0, csd1, csd2"
    assert format_node_names(["host", "csd0", "csd1", "csd2"]) == "host, csd[0-2]"
    assert format_node_names(f"csd{2 * number}" for number in range(10)).endswith("csd14, and 2 more")


@pytest.mark.parametrize(
    "pattern",
    ["csd", "csd[0-2]", "csd[08-11].lab", "r[1-2]n[0-3]", "[0-0]", "x[007-012][a]", "[0-1][0-1][0-1]"],
)
def test_count_and_ends_are_those_of_the_names(pattern: str) -> None:
    names = expand_range(pattern)
    assert count_range(pattern) == len(names)
    assert range_ends(pattern) == (names[0], names[-1])


@pytest.mark.parametrize(
    "pattern",
    [
        "csd[7-0]",
        f"csd[0-{MAX_RANGE}]",
        "csd[0-999][0-999]",
        "csd[0-" + "9" * 200 + "]",
        "[0-0]" * MAX_PATTERN,
        "x" * (MAX_PATTERN + 1),
    ],
)
def test_patterns_are_refused_before_they_are_expanded(pattern: str) -> None:
    for function in (count_range, expand_range, range_ends):
        with pytest.raises(InputError):
            function(pattern)
