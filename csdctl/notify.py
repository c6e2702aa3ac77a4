"""Text for the user: the callback that lower layers report with, and how text of others is made printable.

Text of a node, a file or a server may hold characters that a terminal obeys: they move the cursor, write to
the clipboard, reverse the direction of text. The command line replaces them in everything that it writes
(csdctl/terminal/streams.py and console.py). What writes a log does it itself.
"""

import re
import sys
import unicodedata
from collections.abc import Callable

Say = Callable[[str], None]
"""Show one line of text."""

MAX_MARKS = 4
"""Combining marks on one character; no language needs more, and a hundred of them cover the lines around."""

# Letters and marks without any shape: fillers, the blank of Braille, variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_ORDINARY = re.compile(
    "[\n\x20-\x7e\xa1-\xac\xae-\u02ff\u2010-\u2027\u2030-\u205e\u2190-\u22ff\u2500-\u257f]*"
)
"""Text that needs no further look: Latin letters, punctuation, arrows, mathematics, the frames of tables."""
DATED = re.compile(r"^\d{4}-\d\d-\d\dT\S+ ")
"""The time of a line, as ISO 8601, in the log of a csdctl without a terminal."""
DETACHED = "CSDCTL_DETACHED"
"""The environment variable with which csdctl dates the lines that it writes."""


def warn(line: str) -> None:
    """Show a line where nothing else shows it, on standard error."""
    print(line, file=sys.stderr)


def make_printable(text: str) -> str:
    """Return `text` with an escape such as \\x1b or \\u202e in place of each character that shows no shape.

    These are the characters that `repr` escapes (C0 and C1 controls, directions, zero widths, all separators
    but the space, surrogates, unassigned ones), fillers, and combining marks after MAX_MARKS in a row.
    Newlines and tabs stay. Text that was made printable stays as it is.
    """
    if _ORDINARY.fullmatch(text):
        return text
    characters: list[str] = []
    num_marks = 0
    for char in text:
        num_marks = num_marks + 1 if unicodedata.category(char) in ("Mn", "Me") else 0
        has_shape = char.isprintable() and num_marks <= MAX_MARKS and not _INVISIBLE.match(char)
        characters.append(char if has_shape or char in "\n\t" else char.encode("unicode_escape").decode())
    return "".join(characters)


def shorten(text: str, max_length: int) -> str:
    """Return the first `max_length` characters of a longer `text`, and how many it has."""
    return text if len(text) <= max_length else f"{text[:max_length]}… ({len(text):,} characters)"
