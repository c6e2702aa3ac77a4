"""The recording of `make demo` in README.md: small, without a script or anything from elsewhere."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "demo.svg"
MAX_BYTES = 300_000


def test_picture_loads_nothing_and_runs_nothing() -> None:
    text = PICTURE.read_text()
    assert len(text.encode()) < MAX_BYTES
    root = ElementTree.fromstring(text)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} == {
        *("svg", "title", "style", "rect", "defs", "g", "text", "use"),
    }
    addresses = [
        value
        for element in root.iter()
        for name, value in element.attrib.items()
        if name.endswith("href") or "url(" in value
    ]
    assert all(value.startswith("#") for value in addresses)
    assert "@import" not in text
    assert "url(" not in text


def test_picture_shows_the_whole_demo_and_no_path_of_the_machine() -> None:
    text = PICTURE.read_text()
    for command in ("make demo", "csdctl discover", "csdctl tune", "csdctl train", "csdctl report"):
        assert command in text
    assert "left" in text
    assert set(re.findall(r"[> ](/[a-z]+/[\w.-]+)", text)) <= {"/tmp/csdctl"}
