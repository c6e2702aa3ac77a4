"""The aliases of an ssh_config: its `Host` lines, including those of included files.

Only names are read here; OpenSSH itself resolves their settings.
"""

import glob
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from csdctl.documents import load_text, split_lines
from csdctl.errors import InputError

_MAX_DEPTH = 16
_MAX_FILES = 200
_LINE = re.compile(r"\s*(?P<keyword>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<rest>.*\S)\s*")


def list_aliases(path: Path) -> list[str]:
    """Return every literal name (no pattern) of the Host lines of `path`; raises InputError."""
    aliases = dict.fromkeys(_aliases(path, []))
    if not aliases:
        raise InputError(
            f"{path} has no Host line with a name",
            remedy="patterns such as `Host csd*` do not name a machine",
        )
    return list(aliases)


def _aliases(path: Path, read: list[Path], depth: int = 0) -> Iterator[str]:
    """Yield the names in `path` and the files that it includes; `read` are the files so far."""
    if depth > _MAX_DEPTH:
        raise InputError(f"{path}: includes are nested more than {_MAX_DEPTH} levels deep")
    read.append(path)
    if len(read) > _MAX_FILES:
        raise InputError(f"{path}: more than {_MAX_FILES} included files")
    lines = split_lines(load_text(path, remedy="give the file that ssh uses", errors="replace"), str(path))
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        keyword = found["keyword"].lower() if found else ""
        if found and keyword in ("host", "include"):
            words = _words(found["rest"], f"{path}:{number}")
            if keyword == "host":
                yield from (word for word in words if not re.search(r"[*?!]", word))
            else:
                for file in _included(words):
                    yield from _aliases(file, read, depth + 1)


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _included(patterns: list[str]) -> Iterator[Path]:
    for pattern in patterns:
        full = Path.home() / ".ssh" / os.path.expanduser(pattern)
        yield from (Path(match) for match in sorted(glob.glob(str(full))))
