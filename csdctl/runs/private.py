"""Directories of one user: csdctl's own, and the one of step files. Light: every command checks it."""

import contextlib
import os
import stat
from pathlib import Path

from csdctl.errors import InputError

STATE_DIRECTORY = ".csdctl"
SHARED_MEMORY = Path("/dev/shm")


def check_directory(directory: Path) -> None:
    """Raise InputError if something else is in the place of `directory`, such as a link to nothing."""
    if os.path.lexists(directory) and not directory.is_dir():
        link = f", but a link to {directory.readlink()}" if directory.is_symlink() else ""
        raise InputError(
            f"{directory}, where csdctl keeps its files, is not a directory{link}",
            remedy="mount or create what it links to, or remove the link" if link else "move that file away",
        )


def check_private(directory: Path) -> None:
    """Narrow `directory`, whose files csdctl trusts, to this user. Raises InputError if others may write."""
    check_directory(directory)
    try:
        link, status, around = directory.lstat(), directory.stat(), directory.parent.stat()
    except FileNotFoundError:
        return
    if {link.st_uid, status.st_uid} != {os.geteuid()}:
        raise InputError(
            f"{directory} belongs to another user, who could change what csdctl trusts",
            remedy="run csdctl in a directory of your own, or as the user that it belongs to",
        )
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        raise InputError(
            f"every user can change {directory.parent}, and so the files that csdctl trusts",
            remedy=f"chmod o-w {directory.parent}",
        )
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def private_memory(parent: Path = SHARED_MEMORY) -> Path | None:
    """Return this user's own directory in the machine's memory, created when it is missing.

    None where another user has put one in its place, or may write to it.
    """
    path = parent / f"csdctl-{os.geteuid()}"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700)
    try:
        status = path.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return path if is_own and not stat.S_IMODE(status.st_mode) & 0o077 else None
