"""The files below a root, in the same order on every machine; links out of the root are refused."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from csdctl.worker.process.errors import WorkerError

IGNORED = ("lost+found",)
"""Directories that a file system creates in its own root; names that begin with a dot are ignored too."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file below a root."""

    parts: tuple[str, ...]
    size: int
    mtime_ns: int

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.parts[-1]


@dataclass(frozen=True)
class Tree:
    """Files below `root`, sorted. If the root itself is a file, it is the only one and has no parts."""

    root: Path
    files: tuple[DataFile, ...]
    folders: tuple[str, ...]
    """Names of the folders directly below the root."""

    def path_of(self, file: DataFile) -> Path:
        """Return the path of `file`."""
        return self.root.joinpath(*file.parts)

    def fingerprint(self, settings: str) -> str:
        """Return a hash that changes with `settings` and whenever a file is added, removed or modified."""
        digest = hashlib.sha256(f"4\0{settings}\0".encode() + os.fsencode(self.root.resolve()))
        for file in self.files:
            digest.update(b"\0".join(os.fsencode(part) for part in file.parts))
            digest.update(f"\0\0{file.size}\0{file.mtime_ns}\n".encode())
        return digest.hexdigest()[:32]


def read_tree(source: str) -> Tree:
    """List the files at `source`, a path as written in the job.

    Raises WorkerError, exit code 2, if nothing exists there, or a link leads out of it or to a directory.
    """
    try:
        root = Path(source).expanduser()
    except RuntimeError:
        raise WorkerError(f"there is no home directory for {source}", exit_code=2) from None
    try:
        if not root.exists():
            raise WorkerError(f"there is no data at {source}", remedy="fix the path in job.yaml", exit_code=2)
        if root.is_file():
            status = root.stat()
            return Tree(root, (DataFile((), status.st_size, status.st_mtime_ns),), ())
        within = os.path.join(os.path.realpath(root), "")
        files = tuple(_walk(root, (), within, source))
        folders = tuple(entry.name for entry in _entries(root) if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise WorkerError(
            f"data at {source} cannot be read: {error.strerror}",
            remedy="fix its path or its permissions",
            exit_code=2,
        ) from None
    return Tree(root, files, folders)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as found:
        kept = [entry for entry in found if not entry.name.startswith(".") and entry.name not in IGNORED]
    return sorted(kept, key=lambda entry: os.fsencode(entry.name))


def _walk(directory: Path, parts: tuple[str, ...], within: str, source: str) -> Iterator[DataFile]:
    for entry in _entries(directory):
        here = (*parts, entry.name)
        if entry.is_symlink():
            _check_link(entry, within, source)
        elif entry.is_dir():
            yield from _walk(directory / entry.name, here, within, source)
            continue
        if entry.is_file():
            status = entry.stat()
            yield DataFile(here, status.st_size, status.st_mtime_ns)
        elif entry.is_symlink():  # dangling, which is detected and counted when it is read
            yield DataFile(here, 0, 0)


def _check_link(entry: os.DirEntry[str], within: str, source: str) -> None:
    """Raise WorkerError unless a link points to a file below the same root."""
    if not os.path.realpath(entry.path).startswith(within):
        raise WorkerError(
            f"data at {source} has a link that leads out of it",
            remedy="replace the link with the file itself, or remove it",
            exit_code=2,
        )
    if entry.is_dir():
        raise WorkerError(
            f"data at {source} has a link to a directory",
            remedy="replace the link with the directory itself, or remove it",
            exit_code=2,
        )
