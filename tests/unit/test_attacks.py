"""Every attack of docs/reference/attacks.md has tests that make it, in the files that the page names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "attacks.md"
ATTACKS = range(1, 19)


def table() -> dict[int, list[str]]:
    """The files of tests that the page names for each attack."""
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+)`", files) for number, files in rows}


def marked_files(number: int) -> set[str]:
    """The files with tests that carry `@pytest.mark.attack(number)`."""
    mark = f"pytest.mark.attack({number})"
    paths = (ROOT / "tests" / "attacks").glob("test_*.py")
    return {str(path.relative_to(ROOT)) for path in paths if mark in path.read_text()}


def test_table_has_every_attack_once() -> None:
    assert list(table()) == list(ATTACKS)


@pytest.mark.parametrize("number", ATTACKS)
def test_page_names_the_files_with_tests_of_the_attack(number: int) -> None:
    assert set(table()[number]) == marked_files(number)
