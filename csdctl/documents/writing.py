"""Write files atomically: to a temporary file or directory, synced and renamed.

A reader never sees a partial file, and a crash leaves the old file.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def save_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and sync it."""
    save_bytes(path, text.encode())


def save_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically and sync it."""
    with write_atomically(path) as file:
        file.write(content)


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, synced and renamed to `path` on exit; after an error `path` is unchanged."""
    make_directory(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_directory(directory: Path) -> None:
    """Create `directory` and its missing parents, for this user alone, whatever the umask is."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def build_atomically(directory: Path) -> Iterator[Path]:
    """Yield an empty directory whose files are synced and which replaces `directory` on exit.

    After an error `directory` is unchanged.
    """
    make_directory(directory.parent)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_json(path: Path, content: object) -> None:
    """Write `content` as indented JSON, atomically."""
    save_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")
