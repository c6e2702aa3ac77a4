"""Limits of size that CONTRIBUTING.md names."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "csdctl").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
TRAVELS_AS_ONE_TEXT = ROOT / "csdctl" / "standalone" / "receive.py"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_COMMAND_LINES, MAX_PATCHES = 400, 60, 60, 15
PATCH = re.compile(r"\.(?:setattr|setitem|delattr)\(|\bmock\.patch|\bpatch\.object\(")


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every function of a file, with its lines, decorators included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - start + 1


def test_files_are_not_too_long() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES if path != TRAVELS_AS_ONE_TEXT}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_not_too_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{name} has {lines} lines"
        for path in SOURCES
        if path.is_relative_to(ROOT / "csdctl")
        for name, lines in functions_of(path)
        if lines > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_commands_are_not_too_long() -> None:
    commands = sorted((ROOT / "csdctl" / "cli" / "commands").glob("*.py"))
    assert len(commands) > 10
    assert max(lines for path in commands for _, lines in functions_of(path)) <= MAX_COMMAND_LINES


def test_few_tests_patch_what_they_test() -> None:
    patches = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "tests") and path != Path(__file__)
        for line in path.read_text().splitlines()
        if PATCH.search(line)
    ]
    assert len(patches) <= MAX_PATCHES, "\n".join(patches)


def test_links_lead_to_files_of_the_project() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    links = [ROOT / line.split("\t", 1)[1] for line in tracked if line.startswith("120000 ")]
    assert [
        f"{link.relative_to(ROOT)} -> {link.readlink()}"
        for link in links
        if not link.exists() or not link.resolve().is_relative_to(ROOT)
    ] == []
