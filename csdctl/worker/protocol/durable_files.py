"""Files and directories that are complete or absent after a power cut, and stay once they are written.

What is written is synced before it gets its name, and the directory that has the name afterwards. Until then
it is `.NAME.xxxxxxxx`, beside its path and locked. Where the lock is free, its writer was killed: the next
writer of the same path removes it.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

UNSYNCED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EACCES)
"""Errors of a directory on a file system that syncs none, or that this user may not list."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file of only this user, which then replaces `path` unless there is an error. Raises OSError."""
    with _created_beside(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as (part, descriptor):
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            yield file
        os.fsync(descriptor)
        os.replace(part, path)
        sync(path.parent)


@contextlib.contextmanager
def replacing_by_name(path: Path) -> Iterator[Path]:
    """Yield a path with the same name, at which to write a file. It then replaces `path`. Raises OSError."""
    with _created_beside(path, os.O_DIRECTORY) as (part, _):
        yield part / path.name
        sync(part / path.name)
        os.replace(part / path.name, path)
        sync(path.parent)


@contextlib.contextmanager
def replacing_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory of only this user, which then replaces `directory`. Raises OSError."""
    with _created_beside(directory, os.O_DIRECTORY) as (part, _):
        yield part
        for path in (*part.rglob("*"), part):
            sync(path)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(part, directory)
        sync(directory.parent)


def save_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` as `replacing` does."""
    with replacing(path) as file:
        file.write(content)


def save_text(path: Path, text: str) -> None:
    """Write `text` to `path` as `replacing` does. Bytes of paths that are not UTF-8 stay as they are."""
    save_bytes(path, text.encode(errors="surrogateescape"))


def make_directory(directory: Path) -> None:
    """Create `directory` and its missing parents for only this user, whatever the umask. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        sync(directory.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory if that is possible, to disk. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in UNSYNCED or not path.is_dir():
            raise


@contextlib.contextmanager
def _created_beside(path: Path, flags: int) -> Iterator[tuple[Path, int]]:
    """Yield a new locked file or directory, and its descriptor. It is removed unless it gets another name."""
    make_directory(path.parent)
    is_abandoned = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}").fullmatch
    with contextlib.suppress(PermissionError):
        for name in filter(is_abandoned, os.listdir(path.parent)):
            _remove_abandoned(path.with_name(name))
    try:
        part, descriptor = _create_locked(path, flags)
    except OSError as error:
        error.filename = str(path)  # not the temporary file, which the user has not named
        raise
    try:
        yield part, descriptor
    except OSError as error:
        error.filename = error.filename or str(path)  # of a write: the disk is full
        raise
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):  # the error before says more
            _remove(part)


def _create_locked(path: Path, flags: int) -> tuple[Path, int]:
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        if flags & os.O_DIRECTORY:
            part.mkdir(mode=0o700)
        try:
            descriptor = os.open(part, flags, 0o600)
        except FileNotFoundError:
            if part.parent.is_dir():
                continue  # another writer has removed the directory, which was not locked yet
            raise
        with contextlib.suppress(OSError):  # on a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if part.exists():
            return part, descriptor
        os.close(descriptor)


def _remove_abandoned(part: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(OSError))  # it is locked or removed, or cannot be locked
        descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(part)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
