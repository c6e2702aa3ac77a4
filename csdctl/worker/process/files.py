"""Files that survive a crash: written aside, synced, renamed."""

import os
from pathlib import Path
from typing import IO


def save_aside(path: Path, text: str) -> None:
    """Write `text` to `path` aside, sync it, and rename it into place."""
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
    """Put on the disk which names `directory` has."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
