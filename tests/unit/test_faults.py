"""The tests that docs/reference/faults.md and attacks.md name exist and carry the number."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def named_in(page: str) -> list[tuple[int, str]]:
    """Return what the table of the page names as tests, with the number of the row."""
    text = (ROOT / "docs" / "reference" / page).read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    assert rows
    return [(int(number), name) for number, cell in rows for name in re.findall(r"`([^`]+)`", cell)]


@functools.cache
def decorators_in(file: str) -> dict[str, list[str]]:
    """Return the decorators of each test of a file."""
    functions = [
        node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
    ]
    return {one.name: [ast.unparse(decorator) for decorator in one.decorator_list] for one in functions}


@pytest.mark.parametrize(("number", "name"), named_in("faults.md"))
def test_test_of_a_fault_exists_and_carries_the_number(number: int, name: str) -> None:
    file, _, test = name.partition("::")
    assert f"pytest.mark.fault({number})" in decorators_in(file)[test]


@pytest.mark.parametrize(("number", "file"), named_in("attacks.md"))
def test_file_with_tests_of_an_attack_exists_and_carries_the_number(number: int, file: str) -> None:
    assert f"pytest.mark.attack({number})" in (ROOT / file).read_text()
