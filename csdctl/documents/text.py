"""Read files of text and of JSON, whatever a file is: a device, a link to one, or larger than memory.

JSON is read as RFC 8259 has it: no duplicate names, finite numbers, bounded size and depth.
"""

import json
import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from csdctl.errors import InputError

MAX_TEXT_BYTES = 2 << 20
"""Size of a file written by people; the plan of 4,000 ranks has a third of it."""
MAX_DIGITS = 18
"""Digits of an integer: it fits in 64 bits, as in other languages that read JSON."""
MAX_LINE = 10_000
"""Characters in a line of a file whose format has lines."""
MAX_JSON_BYTES = 16 << 20
"""Size of a JSON file written by csdctl; the facts of 1,000 machines have a third of it."""
MAX_JSON_VALUES = 1_000_000
MAX_JSON_DEPTH = 50

AGAIN = "remove it, and create it again"
_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Where the shell puts the output of `<(command)`."""


def load_text(
    path: Path, *, max_bytes: int = MAX_TEXT_BYTES, remedy: str = "", errors: str = "strict"
) -> str:
    """Read a UTF-8 text file; raises InputError if it is missing, no regular file, too large or no text.

    `errors` as in `bytes.decode`.
    """
    try:
        content = _read(path, max_bytes + 1)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}", remedy=remedy) from None
    if len(content) > max_bytes:
        raise InputError(
            f"{path} has more than {max_bytes:,} bytes, the most that csdctl reads of such a file"
        )
    try:
        return content.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} cannot be read: byte {error.start} is not UTF-8 text", remedy="save it as UTF-8"
        ) from None


def split_lines(text: str, name: str) -> list[str]:
    """Return the lines of `text`, which end at line feeds alone; raises InputError for a very long line.

    `name` identifies the text in messages.
    """
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            raise InputError(f"{name}:{number}: {len(line):,} characters, expected at most {MAX_LINE:,}")
    return lines


def _read(path: Path, num_bytes: int) -> bytes:
    is_pipe_allowed = str(path).startswith(_DESCRIPTORS)
    # Without O_NONBLOCK, opening a named pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_pipe_allowed else os.O_NONBLOCK))
    with os.fdopen(descriptor, "rb") as file:
        if not (is_pipe_allowed or stat.S_ISREG(os.fstat(descriptor).st_mode)):
            raise ValueError("it is not a regular file")
        return file.read(num_bytes)


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
