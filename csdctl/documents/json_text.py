"""Parse JSON as RFC 8259 has it: no duplicate names, finite numbers, bounded size and depth."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from csdctl.documents.text import MAX_DIGITS, load_text
from csdctl.errors import InputError

MAX_JSON_BYTES = 16 << 20
"""Of a file written by csdctl; the facts of 1,000 machines have a third of it."""
MAX_JSON_VALUES = 1_000_000
MAX_JSON_DEPTH = 50

AGAIN = "remove it, and create it again"


def load_json(path: Path, *, remedy: str = AGAIN) -> Any:
    """Read a JSON file written by csdctl; raises InputError when it is missing, damaged or too large."""
    return parse_json_document(
        load_text(path, max_bytes=MAX_JSON_BYTES, remedy=remedy), str(path), remedy=remedy
    )


def parse_json_document(text: str, name: str, *, remedy: str = AGAIN) -> Any:
    """Parse JSON `text`; `name` identifies it in the InputError for text that is damaged or too large."""
    # Every value but the first follows one of these characters: counting them is fast, and never too low.
    if sum(map(text.count, ",[{")) >= MAX_JSON_VALUES:
        raise InputError(f"{name} has more than {MAX_JSON_VALUES:,} values", remedy=remedy)
    try:
        content = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError(f"{name} cannot be read: {problem}", remedy=remedy) from None
    if _is_deeper_than(MAX_JSON_DEPTH, content):
        raise InputError(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep", remedy=remedy)
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"duplicate name {name[:80]!r}")
        content[name] = value
    return content


def _integer(text: str) -> int:
    num_digits = len(text.lstrip("-"))
    if num_digits > MAX_DIGITS:
        raise ValueError(f"a number of {num_digits:,} digits, expected at most {MAX_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


def _is_deeper_than(depth: int, content: object) -> bool:
    """Return whether lists and objects in `content` are nested more than `depth` levels deep."""
    level = [content]
    for _ in range(depth):
        level = [item for value in level for item in _items(value)]
    return any(isinstance(value, list | dict) for value in level)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
