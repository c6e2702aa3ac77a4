"""The notebook of the docs: without outputs, and shown on the site by the hook of mkdocs."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TUTORIALS = Path(__file__).parents[3] / "docs" / "tutorials"
NOTEBOOK: dict[str, Any] = json.loads((TUTORIALS / "notebook.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_notebook_has_no_outputs() -> None:
    assert CODE
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_page_has_all_cells_under_one_title() -> None:
    hook = runpy.run_path(str(TUTORIALS / "notebook_page.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/notebook.md"))
    shown = str(hook("# A notebook\n", page=page, config=None, files=None))
    assert all("".join(cell["source"]) in shown for cell in CODE)
    assert [line for line in shown.splitlines() if line.startswith("# ")] == ["# A notebook"]
