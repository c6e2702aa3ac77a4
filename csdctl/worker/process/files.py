"""Archives of bounded size, and files that no other user may have touched."""

import io
import os
import stat
from pathlib import Path


class BoundedFile(io.BufferedReader):
    """A file of which no more is read than its size, whatever sizes an archive in it names."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes."""
        most = os.fstat(self.fileno()).st_size
        return super().read(size if size is not None and 0 <= size <= most else most)


def open_private(path: Path, *, is_creating: bool = False) -> int:
    """Return a descriptor of a file that only this user can have created or changed. Raises OSError."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_own(directory, path.parent, stat.S_IWGRP | stat.S_IWOTH)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in its place must not block
        flags |= os.O_CREAT if is_creating else 0
        descriptor = os.open(path.name, flags, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        _check_own(descriptor, path, stat.S_IRWXG | stat.S_IRWXO)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_own(descriptor: int, path: Path, forbidden: int) -> None:
    """Raise PermissionError unless it is a directory or a file of only this user, with one name."""
    status = os.fstat(descriptor)
    is_one = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
    if not is_one or status.st_uid != os.geteuid() or status.st_mode & forbidden:
        raise PermissionError(
            f"{path} is {stat.filemode(status.st_mode)} of user {status.st_uid}, {status.st_nlink} names, "
            f"expected a directory or a file with one name of user {os.geteuid()}, without mode {forbidden:o}"
        )
