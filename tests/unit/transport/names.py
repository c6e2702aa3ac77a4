"""File names and arguments that break naive quoting."""

NASTY_NAMES = [
    "with space",
    "semi;colon",
    "$(touch pwned)",
    "`touch pwned`",
    "new\nline",
    "-rf",
    "--help",
    "quote'quote\"quote",
    "*",
    "back\\slash",
    "ü€",
    "~",
]
