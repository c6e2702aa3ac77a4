"""The page of JSON documents, as tests compare documents with it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "json.md"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "list": (list,),
    "text": (str,),
    "bool": (bool,),
    "number": (int, float),
    "any": (object,),
}


def documented() -> dict[str, dict[str, str]]:
    """Return schema → field → type, with `, optional` where it may be absent."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        section.split("\n", 1)[0]: dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
        for section in sections
    }


def examples() -> Iterator[Any]:
    """Return the examples of the page."""
    for text in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL):
        yield json.loads(text)


def find_deviations(document: dict[str, Any], fields: dict[str, str]) -> list[str]:
    """Return what of `document` the page does not say, and what the page says that is not so."""
    names = [name for name in document if name != "schema"]
    found = [f"{name} is not documented" for name in names if name not in fields]
    found += [
        f"{name} is absent"
        for name, kind in fields.items()
        if name not in document and not kind.endswith(", optional")
    ]
    for name in names:
        kind = fields.get(name, "any").removesuffix(", optional")
        if not isinstance(document[name], TYPES[kind]):
            found.append(f"{name}: {kind} is documented, received {document[name]!r:.80}")
    return found
