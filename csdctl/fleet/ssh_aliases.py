"""The aliases of an ssh_config: its `Host` lines, including those of included files.

Only names are read here; OpenSSH itself resolves their settings.
"""

import glob
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from csdctl.errors import InputError

_MAX_DEPTH = 16
_LINE = re.compile(r"\s*(?P<keyword>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<rest>.*\S)\s*")


def list_aliases(path: Path) -> list[str]:
    """Return every literal name (no pattern) of the Host lines of `path`; raises InputError."""
    aliases = dict.fromkeys(_aliases(path, 0))
    if not aliases:
        raise InputError(
            f"{path} has no Host line with a name",
            remedy="patterns such as `Host csd*` do not name a machine",
        )
    return list(aliases)


def _aliases(path: Path, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise InputError(f"{path}: includes are nested more than {_MAX_DEPTH} levels deep")
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", remedy="give the file that ssh uses") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        keyword = found["keyword"].lower() if found else ""
        if found and keyword in ("host", "include"):
            words = _words(found["rest"], f"{path}:{number}")
            if keyword == "host":
                yield from (word for word in words if not re.search(r"[*?!]", word))
            else:
                for file in _included(words):
                    yield from _aliases(file, depth + 1)


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _included(patterns: list[str]) -> Iterator[Path]:
    for pattern in patterns:
        full = Path.home() / ".ssh" / os.path.expanduser(pattern)
        yield from (Path(match) for match in sorted(glob.glob(str(full))))
