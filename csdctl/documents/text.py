"""Read files of text and of JSON, whatever a file is: a device, a link to one, or larger than memory."""

import json
import os
import stat
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
    """Parse JSON `text`; `name` identifies it in the InputError for text that is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError(f"{name} cannot be read: {problem}", remedy=remedy) from None
