import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.errors import InputError
from csdctl.fleet.ranges import expand_range, fold_names, fold_ordered, show_names

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


@given(st.lists(NAMES, max_size=40))
def test_folded_names_expand_to_the_same_names(names: list[str]) -> None:
    expanded = [name for pattern in fold_names(names) for name in expand_range(pattern)]
    assert sorted(expanded) == sorted(set(names))


@given(st.lists(st.tuples(NAMES, NAMES), max_size=30))
def test_folded_rows_expand_to_the_same_rows_in_their_order(rows: list[tuple[str, str]]) -> None:
    expanded = [
        row
        for _, _, (name, address) in fold_ordered(rows)
        for row in zip(expand_range(name), expand_range(address), strict=True)
    ]
    assert expanded == rows


def test_message_line_is_bounded() -> None:
    assert show_names(f"csd{2 * number}" for number in range(10)).endswith("csd14, and 2 more")
    assert show_names(f"csd{number}" for number in range(1000)) == "csd[0-999]"


def test_reversed_range_is_refused() -> None:
    with pytest.raises(InputError, match="is invalid"):
        expand_range("csd[7-0]")
