"""What is left out of the usual run is only a further variant of a test that is in it."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MARK = "pytest.mark.thorough"


def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == MARK


def is_variant(node: ast.AST) -> bool:
    """Return whether `node` is a parameter, or `*(… for …)` of parameters, that is marked as thorough."""
    if isinstance(node, ast.Starred) and isinstance(node.value, ast.GeneratorExp):
        return is_variant(node.value.elt)
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pytest.param"
        and any(ast.unparse(word.value) == MARK for word in node.keywords if word.arg == "marks")
    )


def variants_beside_others(path: Path) -> list[ast.AST]:
    """Return the variants in lists whose first parameter always runs."""
    found: list[ast.AST] = []
    for node in nodes_of(path):
        if isinstance(node, ast.List) and node.elts and not is_variant(node.elts[0]):
            found += [one for one in node.elts if is_variant(one)]
    return found


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)}


def variant_of(function: ast.FunctionDef) -> str:
    """Return the test that the function's mark names, or nothing."""
    for one in function.decorator_list:
        if isinstance(one, ast.Call) and is_mark(one.func):
            return str(ast.literal_eval(one.args[0]))
    return ""


FILES = [path for path in sorted(TESTS.rglob("test_*.py")) if MARK in path.read_text()]
FILES.remove(Path(__file__))
FUNCTIONS = [
    pytest.param(function, id=f"{path.relative_to(TESTS)}::{function.name}")
    for path in FILES
    for function in functions_of(path).values()
    if variant_of(function)
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_variants_are_parameters_beside_others_or_name_another_test(path: Path) -> None:
    named = [function for function in functions_of(path).values() if variant_of(function)]
    marks = [node for node in nodes_of(path) if is_mark(node)]
    assert len(marks) == len(variants_beside_others(path)) + len(named)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_test_that_a_variant_names_always_runs(function: ast.FunctionDef) -> None:
    file, _, name = variant_of(function).partition("::")
    other = functions_of(TESTS / file)[name]
    assert not variant_of(other)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_fault_and_no_attack_is_shown_by_a_variant_alone(function: ast.FunctionDef) -> None:
    marks = [ast.unparse(one) for one in function.decorator_list]
    assert not [mark for mark in marks if mark.startswith(("pytest.mark.fault", "pytest.mark.attack"))]
