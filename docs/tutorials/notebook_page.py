"""A hook of mkdocs: the notebook's page shows its cells, so that the site needs no plugin for notebooks."""

import json
from pathlib import Path
from typing import Any

PAGE = "tutorials/notebook.md"
NOTEBOOK = Path(__file__).with_name("notebook.ipynb")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Append the cells to their page, and return every other page as it is."""
    if page.file.src_uri != PAGE:
        return markdown
    return "\n\n".join([markdown, *map(_as_markdown, json.loads(NOTEBOOK.read_text())["cells"])])


def _as_markdown(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "code":
        return f"```python\n{text}\n```"
    return f"#{text}" if text.startswith("#") else text  # the page has a title of its own
