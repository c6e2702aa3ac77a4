"""Crash-safe files: written to a temporary file, synced, renamed."""

import os
from pathlib import Path
from typing import IO


def save_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary file beside `path`, sync it, and rename it to `path`."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("wb") as file:
        file.write(text.encode())
        sync_file(file)
    os.replace(aside, path)


def sync_file(file: IO[bytes]) -> None:
    """Flush `file` and sync it to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Sync the entries of `directory` to disk, so that renames in it survive a crash."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
