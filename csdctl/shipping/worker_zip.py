"""The worker as a zip file that Python runs, and the job's own code as a zip file that it imports from.

The same source gives the same bytes with one version of Python: fixed times, sorted names, no compression.
"""

import importlib.util
import io
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from marshal import dumps  # noqa: TID251, only what reads it can run code
from pathlib import Path

MAIN = "from csdctl.worker.__main__ import run\n\nrun()\n"
UNCHECKED_HASH = (1).to_bytes(4, "little")
"""Flags of a .pyc file that Python does not compare with its source (PEP 552)."""
REPRODUCIBLE = 2
"""The newest version of marshal's format in which the same code is always the same bytes."""


@cache  # compiling takes a quarter of a second, and a command may need the zip for its checks and its run
def pack_worker() -> bytes:
    """Return the zip of the worker. Its bytecode saves a tenth of a process's start on a slow node."""
    root = resources.files("csdctl")
    entries = {"__main__.py": MAIN.encode(), "csdctl/__init__.py": (root / "__init__.py").read_bytes()}
    for name, file in _python_files(root / "worker", "csdctl/worker"):
        entries[name] = file.read_bytes()
        entries[f"{name}c"] = _compile(name, entries[name])
    return _pack(entries)


def pack_code(roots: Sequence[Path]) -> bytes:
    """Return the zip of the Python files and packages `roots`, each under its own name."""
    entries: dict[str, bytes] = {}
    for root in roots:
        if not root.is_dir():
            entries[root.name] = root.read_bytes()
            continue
        entries[f"{root.name}/__init__.py"] = b""
        for name, file in _python_files(root, root.name):
            entries[name] = file.read_bytes()
    return _pack(entries)


def _compile(name: str, source: bytes) -> bytes:
    code = dumps(compile(source, name, "exec", dont_inherit=True), REPRODUCIBLE)
    return importlib.util.MAGIC_NUMBER + UNCHECKED_HASH + importlib.util.source_hash(source) + code


def _pack(entries: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(entries):
            archive.writestr(zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0)), entries[name])
    return packed.getvalue()


def _python_files(directory: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    files = []
    for entry in directory.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            files += _python_files(entry, f"{prefix}/{entry.name}")
        elif entry.name.endswith(".py"):
            files.append((f"{prefix}/{entry.name}", entry))
    return files
