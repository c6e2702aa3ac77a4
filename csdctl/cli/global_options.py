"""Options of every command, accepted anywhere on the command line: -v, -vv, -q, --color."""

import os
from collections.abc import Sequence

from csdctl.errors import InputError
from csdctl.terminal.streams import QUIET, VERBOSE, own_arguments

COLOR = "--color"
COLORS = {"auto": None, "always": "FORCE_COLOR", "never": "NO_COLOR"}
"""Choice → the variable that libraries know it by (no-color.org, force-color.org)."""
JSON = "--json"


def take_global_options(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` without the options of every command; set the colours of this process.

    Raises InputError for an unknown colour, and for -q with -v.
    """
    own = own_arguments(arguments)
    if {*QUIET} & {*own} and {*VERBOSE} & {*own}:
        raise InputError("-q and -v contradict each other", remedy="give one of them")
    rest = []
    words = iter(own)
    for word in words:
        if word == COLOR or word.startswith(f"{COLOR}="):
            _set_color(word.partition("=")[2] if "=" in word else next(words, ""))
        elif word not in (*VERBOSE, *QUIET):
            rest.append(word)
    return [*rest, *arguments[len(own) :]]


def _set_color(choice: str) -> None:
    if choice not in COLORS:
        raise InputError(f"{COLOR} {choice!r}: expected {', '.join(COLORS)}")
    for name in filter(None, COLORS.values()):
        os.environ.pop(name, None)
    if variable := COLORS[choice]:
        os.environ[variable] = "1"
