"""A test that is left out of the usual run names one that is in it."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MARK = "pytest.mark.thorough"


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def variant_of(function: ast.FunctionDef) -> str | None:
    """Return the test that the function's mark names; '' if it names none, None without a mark."""
    for one in function.decorator_list:
        if ast.unparse(one).startswith(MARK):
            return str(ast.literal_eval(one.args[0])) if isinstance(one, ast.Call) else ""
    return None


VARIANTS = {
    f"{path.relative_to(TESTS)}::{function.name}": named
    for path in sorted(TESTS.rglob("test_*.py"))
    if MARK in path.read_text() and path != Path(__file__)
    for function in functions_of(path).values()
    if (named := variant_of(function)) is not None
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_test_that_a_variant_names_always_runs(variant: str) -> None:
    file, _, name = VARIANTS[variant].partition("::")
    assert variant_of(functions_of(TESTS / file)[name]) is None
