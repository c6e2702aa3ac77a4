"""The host's content-addressed store, and files that are hashed once, then read in chunks for every node.

On host and nodes, a stored file has the path `.csdctl/objects/NAME`, relative to the session's directory. A
file with the right name and wrong content is replaced. `deliver` sends files to all nodes in the same order,
so a chunk that was read for one node is in the page cache for the others.

The worker is a zip file that Python runs, the job's own code one that it imports from. The same source gives
the same bytes with one version of Python: fixed times, sorted names, no compression.
"""

import hashlib
import importlib.util
import io
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from marshal import dumps  # noqa: TID251, only what reads it can run code
from pathlib import Path
from typing import BinaryIO

from csdctl.errors import InputError
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.durable_files import replacing

OBJECTS = ".csdctl/objects"
CHUNK_BYTES = 1 << 20
PLAIN_MODE = 0o600
"""The mode of a file without a mode in its name. Files of deployed trees keep the mode of their source."""
MAIN = "from csdctl.worker.__main__ import run\n\nrun()\n"
UNCHECKED_HASH = (1).to_bytes(4, "little")
"""Flags of a .pyc file that Python does not compare with its source (PEP 552)."""
REPRODUCIBLE = 2
"""The newest version of marshal's format in which the same code is always the same bytes."""


@dataclass(frozen=True)
class StoredFile:
    """A file of the store, and its source on the host."""

    name: str
    """Begins with its SHA-256."""
    source: Path
    size: int
    mode: int = PLAIN_MODE
    traffic_class: TrafficClass = TrafficClass.CONTROL

    @property
    def sha256(self) -> str:
        """The SHA-256 of its content, in hex."""
        return self.name[:64]

    @property
    def path(self) -> str:
        """The path on every machine, relative to the session's directory."""
        return f"{OBJECTS}/{self.name}"


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def store_file(path: Path, project: Path, traffic_class: TrafficClass = TrafficClass.CONTROL) -> StoredFile:
    """Copy `path` into the host's store below `project`."""
    with path.open("rb") as source:
        return _store(source, path.suffix, project, traffic_class)


def store_bytes(
    content: bytes, suffix: str, project: Path, traffic_class: TrafficClass = TrafficClass.CONTROL
) -> StoredFile:
    """Write `content` into the host's store below `project`."""
    return _store(io.BytesIO(content), suffix, project, traffic_class)


def _store(source: BinaryIO, suffix: str, project: Path, traffic_class: TrafficClass) -> StoredFile:
    digest = hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
    target = project / OBJECTS / f"{digest}{suffix}"
    if not (target.exists() and hash_file(target) == digest):
        source.seek(0)
        with replacing(target) as file:
            shutil.copyfileobj(source, file, CHUNK_BYTES)
    return stored_as(target.name, target, traffic_class)


def stored_as(name: str, source: Path, traffic_class: TrafficClass) -> StoredFile:
    """Return the file at `source` under its name in the store, which begins with its SHA-256."""
    return StoredFile(name, source, source.stat().st_size, traffic_class=traffic_class)


def hash_source(path: Path) -> StoredFile:
    """Hash a file of a tree. Its name depends on content and mode. Raises InputError."""
    try:
        with open(path, "rb", buffering=0, opener=_open_regular) as file:
            digest = hashlib.file_digest(file, "sha256")
            status = os.fstat(file.fileno())
    except OSError as error:
        raise unreadable(path, error) from error
    mode = status.st_mode & 0o777 | 0o400
    name = digest.hexdigest() + ("" if mode == PLAIN_MODE else f"-{mode:03o}")
    return StoredFile(name, path, status.st_size, mode, TrafficClass.FILES)


def read_chunk(stored: StoredFile, start: int) -> bytes:
    """Return the chunk at `start`, a multiple of CHUNK_BYTES. Raises InputError if the source is shorter."""
    path, num_bytes = stored.source, min(CHUNK_BYTES, stored.size - start)
    try:
        with open(path, "rb", opener=_open_regular) as file:
            file.seek(start)
            chunk = file.read(num_bytes)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(chunk) != num_bytes:
        raise changed(path)
    return chunk


def changed(path: Path) -> InputError:
    """Return the error for a source that changed after it was hashed."""
    return InputError(
        f"{path} changed while it was being deployed",
        remedy="wait until no process writes there, then deploy again; the old files are still in place",
    )


def unreadable(path: str | Path, error: OSError) -> InputError:
    """Return the error for a source that cannot be read."""
    return InputError(f"{path} cannot be read: {error.strerror or error}")


def _open_regular(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


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
