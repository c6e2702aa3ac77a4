"""The notebook of the docs: without outputs, and shown on the site by the hook of mkdocs."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TUTORIALS = Path(__file__).parents[3] / "docs" / "tutorials"
NOTEBOOK: dict[str, Any] = json.loads((TUTORIALS / "notebook.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    specification = importlib.util.spec_from_file_location("notebook_page", TUTORIALS / "notebook_page.py")
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def show(hook: ModuleType, uri: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
    return str(hook.on_page_markdown("# A notebook\n", page=page, config=None, files=None))


def test_notebook_has_no_outputs() -> None:
    assert CODE
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_page_has_all_cells_under_one_title(hook: ModuleType) -> None:
    shown = show(hook, "tutorials/notebook.md")
    assert all("".join(cell["source"]) in shown for cell in CODE)
    assert [line for line in shown.splitlines() if line.startswith("# ")] == ["# A notebook"]
