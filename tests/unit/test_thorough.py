"""What is left out of the usual run is only a further variant of a test that is in it."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MARK = "pytest.mark.thorough"


def marked(path: Path) -> list[ast.AST]:
    """Return the places of a file where something is marked as thorough."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if is_mark(node)]


def is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == MARK


def is_variant(node: ast.AST) -> bool:
    """Return whether `node` is a parameter that is marked as thorough."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pytest.param"
        and any(ast.unparse(word.value) == MARK for word in node.keywords if word.arg == "marks")
    )


def is_starred_variant(node: ast.AST) -> bool:
    """Return whether `node` is `*(pytest.param(…) for …)`."""
    return (
        isinstance(node, ast.Starred)
        and isinstance(node.value, ast.GeneratorExp)
        and is_variant(node.value.elt)
    )


def variants_beside_others(path: Path) -> list[ast.AST]:
    """Return the variants of a file whose first neighbour always runs."""
    found: list[ast.AST] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.List) and node.elts and not is_variant(node.elts[0]):
            found += [one for one in node.elts[1:] if is_variant(one) or is_starred_variant(one)]
    return found


PATHS = [
    path
    for path in sorted(TESTS.rglob("test_*.py"))
    if MARK in path.read_text() and path.name != Path(__file__).name
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(TESTS)))
def test_thorough_is_a_variant_of_a_test_whose_first_variant_always_runs(path: Path) -> None:
    assert marked(path)
    assert len(marked(path)) == len(variants_beside_others(path))
