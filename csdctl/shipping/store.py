"""The host's content-addressed store, and files that are hashed once, then read in chunks for every node.

On host and nodes, a stored file has the path `.csdctl/objects/NAME`, relative to the session's directory. A
file with the right name and wrong content is replaced. `deliver` sends files to all nodes in the same order,
so a chunk that was read for one node is in the page cache for the others.
"""

import hashlib
import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from csdctl.documents import write_atomically
from csdctl.errors import InputError
from csdctl.transport.meter import TrafficClass

OBJECTS = ".csdctl/objects"
CHUNK_BYTES = 1 << 20
PLAIN_MODE = 0o600
"""The mode of a file without a mode in its name. Files of deployed trees keep the mode of their source."""


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
        with write_atomically(target) as file:
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
