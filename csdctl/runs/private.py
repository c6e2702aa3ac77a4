"""The directory of csdctl's own files belongs to one user; light, because every command checks it first."""

import os
import stat
from pathlib import Path

from csdctl.errors import InputError

STATE_DIRECTORY = ".csdctl"


def check_private(directory: Path) -> None:
    """Narrow `directory` to this user, if it exists; raises InputError where another user could change it.

    Its files are trusted: accepted host keys, prepared data, plans, and the worker that runs.
    """
    try:
        link, found, around = directory.lstat(), directory.stat(), directory.parent.stat()
    except FileNotFoundError:
        return
    if {link.st_uid, found.st_uid} != {os.geteuid()}:
        raise InputError(
            f"{directory} belongs to another user, who could change what csdctl trusts",
            remedy="run csdctl in a directory of your own, or as the user that it belongs to",
        )
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        raise InputError(
            f"every user can change {directory.parent}, and so what csdctl trusts",
            remedy=f"chmod o-w {directory.parent}",
        )
    if found.st_mode & 0o077:
        directory.chmod(0o700)
