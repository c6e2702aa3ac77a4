"""The architecture page against the code: its pictures are drawn from it, and what it names exists."""

import ast
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
draw = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py")))


def names_defined_in(path: Path) -> set[str]:
    """Functions by name, methods as Class.method."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef))
    return found


def places_of_the_page() -> list[tuple[str, str]]:
    """Return each file or directory that the page or the picture of a step names, and a function or ''."""
    named = re.findall(r"`([\w/]+(?:/|\.py))(?::([\w.]+))?`", PAGE)
    drawn = [f"worker/{place}".partition(":")[::2] for place, *_ in draw.STEP]
    return sorted({*named, *drawn})


@pytest.mark.parametrize("picture", ["packages", "step"])
def test_picture_is_as_it_would_be_drawn_now(picture: str) -> None:
    drawn = (ROOT / "docs" / "pictures" / f"{picture}.svg").read_text()
    assert drawn == getattr(draw, f"render_{picture}")(), "run `python docs/pictures/draw.py`"


def test_every_package_is_described() -> None:
    cells = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    described = {package for cell in cells for package in re.findall(r"`([\w.]+)`", cell)}
    packages = {
        package for package in draw.read_imports() if (ROOT / "csdctl" / package.replace(".", "/")).is_dir()
    }
    assert packages
    assert packages - described == set(), "packages without a line on the page"


@pytest.mark.parametrize(("path", "function"), places_of_the_page())
def test_what_the_page_names_exists(path: str, function: str) -> None:
    found = [place for place in (ROOT / path, ROOT / "csdctl" / path) if place.exists()]
    assert found
    assert not function or function in names_defined_in(found[0])


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
