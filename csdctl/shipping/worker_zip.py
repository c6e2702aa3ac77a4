"""The worker as one zip file that Python runs directly, and the job's own code as one that it imports from.

The same source gives the same bytes: fixed times, sorted names, no compression.
"""

import io
import zipfile
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

MAIN = "from csdctl.worker.__main__ import run\n\nrun()\n"


def pack_worker() -> bytes:
    """Return the zip: csdctl/__init__.py, csdctl/worker/ and a __main__ that starts the worker."""
    root = resources.files("csdctl")
    entries = {"__main__.py": MAIN.encode(), "csdctl/__init__.py": (root / "__init__.py").read_bytes()}
    for name, file in _python_files(root / "worker", "csdctl/worker"):
        entries[name] = file.read_bytes()
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
