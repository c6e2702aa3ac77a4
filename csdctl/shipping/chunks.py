"""Read source files once for many machines.

Nodes get the same objects in the same order, so a chunk that was read for one node is needed next by the
others. A bounded cache keeps chunks: first those read for hashing, while there is room, then the latest sent.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

from csdctl.errors import InputError

CHUNK_BYTES = 1 << 20
MAX_CACHE_BYTES = 64 << 20

_Key = tuple[str, int]


@dataclass(frozen=True)
class SourceFile:
    """The state of a file when it was hashed."""

    path: str
    size: int
    modified_ns: int
    mode: int
    sha256: str


class SharedChunks:
    """Chunks of source files; the first thread that needs a chunk reads it from disk."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.bytes_read = 0
        """Bytes read from disk so far."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._chunks: OrderedDict[_Key, bytes] = OrderedDict()
        self._loading: dict[_Key, Future[bytes]] = {}

    def hash_source(self, path: str) -> SourceFile:
        """Read and hash a file, caching what fits; raises InputError when it cannot be read or changes."""
        digest = hashlib.sha256()
        try:
            with open(path, "rb", buffering=0, opener=_open_regular) as file:
                before = os.fstat(file.fileno())
                for start in range(0, before.st_size, CHUNK_BYTES):
                    chunk = _read_exactly(file.fileno(), min(CHUNK_BYTES, before.st_size - start), path)
                    digest.update(chunk)
                    self._cache_if_room((path, start), chunk)
                after = os.fstat(file.fileno())
        except OSError as error:
            raise unreadable(path, error) from error
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise changed(path)
        mode = after.st_mode & 0o777 | 0o400
        return SourceFile(path, after.st_size, after.st_mtime_ns, mode, digest.hexdigest())

    def read(self, source: SourceFile, start: int) -> bytes:
        """Return the chunk at `start`, a multiple of CHUNK_BYTES; raises InputError for a changed file."""
        key = (source.path, start)
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
                return self._chunks[key]
            loading = self._loading.get(key)
            if loading is None:
                future = self._loading[key] = Future()
        if loading is not None:
            return loading.result()
        try:
            chunk = _load(source, start)
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            future.set_exception(error)
            raise
        self._cache(key, chunk)
        future.set_result(chunk)
        return chunk

    def _cache_if_room(self, key: _Key, chunk: bytes) -> None:
        with self._lock:
            self.bytes_read += len(chunk)
            if key not in self._chunks and self._num_bytes + len(chunk) <= self._max_bytes:
                self._chunks[key] = chunk
                self._num_bytes += len(chunk)

    def _cache(self, key: _Key, chunk: bytes) -> None:
        with self._lock:
            self.bytes_read += len(chunk)
            del self._loading[key]
            self._chunks[key] = chunk
            self._num_bytes += len(chunk)
            while self._num_bytes > self._max_bytes:
                _, dropped = self._chunks.popitem(last=False)
                self._num_bytes -= len(dropped)


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


def _load(source: SourceFile, start: int) -> bytes:
    try:
        with open(source.path, "rb", buffering=0, opener=_open_regular) as file:
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (source.size, source.modified_ns):
                raise changed(source.path)
            file.seek(start)
            return _read_exactly(file.fileno(), min(CHUNK_BYTES, source.size - start), source.path)
    except OSError as error:
        raise unreadable(source.path, error) from error


def _read_exactly(handle: int, num_bytes: int, path: str) -> bytes:
    chunk = os.read(handle, num_bytes)
    while len(chunk) < num_bytes:
        more = os.read(handle, num_bytes - len(chunk))
        if not more:
            raise changed(path)
        chunk += more
    return chunk
