"""Every fault of docs/reference/faults.md has a test, and the table names tests that carry its number."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = [*range(1, 38), 42, *range(44, 59)]
PAGE = ROOT / "docs" / "reference" / "faults.md"


@functools.cache
def marked_tests() -> dict[int, set[str]]:
    """`file::test` of all tests that carry `@pytest.mark.fault(number)`, by number."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in marks_of(node):
                    found[number].add(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def marks_of(function: ast.FunctionDef) -> list[int]:
    written = [ast.unparse(decorator) for decorator in function.decorator_list]
    return [int(found[1]) for one in written if (found := re.fullmatch(r"pytest\.mark\.fault\((\d+)\)", one))]


def table() -> dict[int, list[str]]:
    """The tests that the page names for each fault."""
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {int(number): re.findall(r"`([^`]+)`", tests) for number, tests in rows}


def test_table_has_every_fault_once() -> None:
    assert list(table()) == list(FAULTS)


@pytest.mark.parametrize("number", FAULTS)
def test_tests_of_the_table_exist_and_carry_the_number(number: int) -> None:
    named = table()[number]
    assert named
    assert set(named) <= marked_tests()[number]
