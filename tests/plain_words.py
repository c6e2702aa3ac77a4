"""Check the names and sentences of the product: `python -m tests.plain_words`, part of `make check`.

Names say what a value is, docstrings have one clause a sentence, calls of many arguments name them, constants
stand above the first definition, and a class name is taken once. CONTRIBUTING.md has the rules.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = Path("csdctl")
PRONOUNS = frozenset(
    (
        "found",
        "one",
        "known",
        "own",
        "wanted",
        "told",
        "whole",
        "other",
        "others",
        "each",
        "rest",
        "left",
        "shown",
    )
)
MAX_POSITIONAL = 5
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
OF_A_PRONOUN = re.compile(r"\b(that|those) of\b", re.IGNORECASE)
DOCUMENT_FIELDS = frozenset((("csdctl/fleet/checks.py", "found"), ("csdctl/reporting/energy.py", "whole")))
"""Names in JSON documents that users read."""
PUBLIC_CLASSES = frozenset(("Fleet", "Job"))
"""Classes of the Python interface that are named as what they wrap."""


def find_problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and description of each problem in a file."""
    tree = ast.parse(path.read_text())
    yield from _misplaced_constants(tree)
    may_read_arguments = "cli" in path.parts or '__name__ == "__main__"' in path.read_text()
    for node in ast.walk(tree):
        for problem in _problems_of(node, path, may_read_arguments=may_read_arguments):
            yield getattr(node, "lineno", 1), problem


def _problems_of(node: ast.AST, path: Path, *, may_read_arguments: bool) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
        text = ast.get_docstring(node) or ""
        if OF_A_PRONOUN.search(text):
            yield "a docstring has 'that of' or 'those of': name the thing"
        if ";" in text:
            yield "a docstring has a semicolon: write two sentences"
    name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""
    name = node.arg if isinstance(node, ast.arg) else name
    if name in PRONOUNS and (str(path), name) not in DOCUMENT_FIELDS:
        yield f"the name {name!r} does not say what the value is"
    if isinstance(node, ast.Call):
        num_positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
        if num_positional > MAX_POSITIONAL:
            yield f"{ast.unparse(node.func)} gets {num_positional} positional arguments: pass them by name"
    if isinstance(node, ast.Global):
        yield f"`global {', '.join(node.names)}`: pass the state, or keep it in an object"
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv" and not may_read_arguments:
        yield "sys.argv is read below the command line: pass the arguments"


def _misplaced_constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the constants below the first definition that need no definition above them."""
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and defined:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            if names & defined:
                defined |= set(map(ast.unparse, targets))
            elif any(CONSTANT.fullmatch(ast.unparse(target)) for target in targets):
                yield node.lineno, f"{ast.unparse(targets[0])} belongs above the first definition"


def main() -> int:
    """Print all problems. Return 1 if there are any."""
    problems, classes = [], defaultdict[str, list[str]](list)
    for path in sorted(PRODUCT.rglob("*.py")):
        problems += [f"{path}:{line}: {problem}" for line, problem in find_problems(path)]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
    for name, places in classes.items():
        if len(places) > 1 and name not in PUBLIC_CLASSES:
            problems.append(f"{places[0]}: the class name {name} is taken again in {', '.join(places[1:])}")
    print("\n".join(problems) or "names and sentences follow the rules")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
