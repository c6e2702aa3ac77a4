"""Source files: hashed once, then read in chunks; a file that changes in between is an error.

Nodes get the same objects in the same order, so a chunk that was read for one node is in the page cache for
the others.
"""

import hashlib
import os
from dataclasses import dataclass

from csdctl.errors import InputError
from csdctl.transport.meter import TrafficClass

CHUNK_BYTES = 1 << 20


PLAIN_MODE = 0o600
"""The mode of a file without another one in its name; deployed trees keep the modes of their source."""


@dataclass(frozen=True)
class StoreObject:
    """A file of the store, and the state of its source when that was hashed."""

    name: str
    """Begins with its SHA-256."""
    path: str
    """The path of the source."""
    size: int
    modified_ns: int
    mode: int = PLAIN_MODE
    traffic_class: TrafficClass = TrafficClass.FILES

    @property
    def sha256(self) -> str:
        """The SHA-256 of its content, in hex."""
        return self.name[:64]


def hash_source(path: str) -> StoreObject:
    """Read and hash a file; its name depends on content and permissions.

    Raises InputError when it cannot be read or changes meanwhile.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0, opener=_open_regular) as file:
            before = os.fstat(file.fileno())
            for start in range(0, before.st_size, CHUNK_BYTES):
                digest.update(_read_exactly(file.fileno(), min(CHUNK_BYTES, before.st_size - start), path))
            after = os.fstat(file.fileno())
    except OSError as error:
        raise unreadable(path, error) from error
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise changed(path)
    mode = after.st_mode & 0o777 | 0o400
    name = digest.hexdigest() + ("" if mode == PLAIN_MODE else f"-{mode:03o}")
    return StoreObject(name, path, after.st_size, after.st_mtime_ns, mode)


def read_chunk(source: StoreObject, start: int) -> bytes:
    """Return the chunk at `start`, a multiple of CHUNK_BYTES; raises InputError for a changed file."""
    try:
        with open(source.path, "rb", buffering=0, opener=_open_regular) as file:
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (source.size, source.modified_ns):
                raise changed(source.path)
            file.seek(start)
            return _read_exactly(file.fileno(), min(CHUNK_BYTES, source.size - start), source.path)
    except OSError as error:
        raise unreadable(source.path, error) from error


def changed(path: str) -> InputError:
    """Return the error for a source that changed after it was hashed."""
    return InputError(
        f"{printable(path)} changed while it was being deployed",
        remedy="wait until no process writes there, then deploy again; the old files are still in place",
    )


def unreadable(path: str, error: OSError) -> InputError:
    """Return the error for a source that cannot be read."""
    return InputError(f"{printable(path)} cannot be read: {error.strerror or error}")


def printable(path: str) -> str:
    """Return a file name in printable form, whatever its bytes are."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _open_regular(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _read_exactly(handle: int, num_bytes: int, path: str) -> bytes:
    chunk = os.read(handle, num_bytes)
    while len(chunk) < num_bytes:
        more = os.read(handle, num_bytes - len(chunk))
        if not more:
            raise changed(path)
        chunk += more
    return chunk
