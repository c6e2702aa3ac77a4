"""Who may read prepared data: its user alone, or on a shared file system whoever may read the source."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from csdctl.worker.ingest.sources.tree import Tree
from csdctl.worker.process.errors import WorkerError

PRIVATE_DIRECTORY, PRIVATE_FILE = 0o700, 0o600
_GROUP_READS, _OTHERS_READ = 0o040, 0o004
_READ = _GROUP_READS | _OTHERS_READ


def open_private(path: Path, *, is_new: bool) -> IO[bytes]:
    """Open a file to read and write, through no link; a new one for this user alone."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if is_new else 0)
    return os.fdopen(os.open(path, flags, PRIVATE_FILE), "r+b")


def make_store(store: Path, source: Path, *, is_shared: bool) -> None:
    """Create the directory of prepared data sets; raises WorkerError where another user could change them.

    On a shared file system it may belong to the owner of the source, who can change the samples anyway.
    """
    store.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    owners = {os.geteuid(), *({0, source.stat().st_uid} if is_shared else ())}
    found = store.stat()
    if not {store.lstat().st_uid, found.st_uid} <= owners:
        raise WorkerError(
            f"{store} belongs to another user, who could change prepared data", remedy="remove it"
        )
    if found.st_uid == os.geteuid():
        # Each data set in a shared store has its own permissions: here only names are seen.
        readers = store.parent.stat().st_mode & (_READ | _READ >> 2) if is_shared else 0
        if stat.S_IMODE(found.st_mode) != PRIVATE_DIRECTORY | readers:
            store.chmod(PRIVATE_DIRECTORY | readers)
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise WorkerError(f"other users can change {store}", remedy="remove it, or run `chmod go-w` on it")


def is_open_to_change(directory: Path) -> bool:
    """Return whether group or others could change a data set, as after a call under another umask."""
    modes = [path.lstat().st_mode for path in (directory, *directory.iterdir())]
    return any(mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(mode) for mode in modes)


def set_access(directory: Path, tree: Tree, *, is_shared: bool) -> None:
    """Let only those read the data set in `directory` who may read every file of its source.

    Private without `is_shared`. Also narrows a data set of an earlier call.
    """
    if directory.stat().st_uid != os.geteuid():
        return
    readers = _readers(tree) if is_shared else 0
    if directory.stat().st_gid != tree.root.stat().st_gid:
        readers &= ~_GROUP_READS
    for path in (*directory.iterdir(), directory):
        mode = PRIVATE_DIRECTORY | readers | readers >> 2 if path == directory else PRIVATE_FILE | readers
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def _readers(tree: Tree) -> int:
    """Return the permissions of group and others to read every file of `tree`."""
    readers = _READ
    directories = {tree.root.joinpath(*file.parts[:-1]) for file in tree.files if file.parts}
    for directory in directories | {above for path in directories for above in path.parents}:
        if directory.is_relative_to(tree.root):
            mode = directory.stat().st_mode
            readers &= mode & mode << 2  # to list a directory, and to enter it
    for file in tree.files:
        if not readers:
            break
        with suppress(FileNotFoundError):  # a dangling link
            readers &= tree.path_of(file).stat().st_mode
    return readers
