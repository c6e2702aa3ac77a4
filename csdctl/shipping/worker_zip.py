"""The worker as one zip file that Python runs directly.

The same source gives the same bytes: fixed times, sorted names, no compression.
"""

import io
import zipfile
from importlib import resources
from importlib.resources.abc import Traversable

MAIN = "from csdctl.worker.__main__ import run\n\nrun()\n"


def pack_worker() -> bytes:
    """Return the zip: csdctl/__init__.py, csdctl/worker/ and a __main__ that starts the worker."""
    root = resources.files("csdctl")
    entries = {"__main__.py": MAIN.encode(), "csdctl/__init__.py": (root / "__init__.py").read_bytes()}
    for name, file in _python_files(root / "worker", "csdctl/worker"):
        entries[name] = file.read_bytes()
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
