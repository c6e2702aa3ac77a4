"""docs/reference/troubleshooting.md quotes messages of the code: each must be one, word for word."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "troubleshooting.md"
VARIABLE = "…"


def messages_of(path: Path) -> set[str]:
    """Return all texts of a file; what is filled in is VARIABLE."""
    texts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else VARIABLE for part in node.values]
            texts.add("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    return texts


def quoted_messages() -> list[str]:
    rows = re.findall(r"^\| (``? ?.+? ?``?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [row.strip("` ") for row in rows]


@pytest.fixture(scope="module")
def messages() -> str:
    return "\n".join(text for path in (ROOT / "csdctl").rglob("*.py") for text in messages_of(path))


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_message_is_one_of_the_code(message: str, messages: str) -> None:
    assert message in messages, f"{message!r} is no message of csdctl any more"


def test_page_quotes_messages_of_every_part() -> None:
    assert len(quoted_messages()) >= 25
