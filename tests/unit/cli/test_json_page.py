"""docs/reference/json.md has every document, with an example as its table says.

Documents of real commands are compared in tests/emulated/running.py.
"""

import re
from pathlib import Path

from tests.json_page import documented, examples, find_deviations

SOURCE = Path(__file__).parents[3] / "csdctl"


def test_every_document_has_a_section() -> None:
    files = [path.read_text() for path in SOURCE.rglob("*.py")]
    named = {name for text in files for name in re.findall(r'"(csdctl\.[\w.-]+/\d+)"', text)}
    assert named
    assert named - {*documented()} == set(), "describe them in docs/reference/json.md"


def test_examples_are_as_their_tables_say() -> None:
    found = {
        example["schema"]: find_deviations(example, documented()[example["schema"]]) for example in examples()
    }
    assert {schema: deviations for schema, deviations in found.items() if deviations} == {}
    assert {*found} == {*documented()}, "every document has an example"
