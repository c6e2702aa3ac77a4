"""One process at a time starts a fleet or takes it down: a lock on its parent directory leaves no file."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from csdctl.documents import make_directory
from csdctl.emulation.state import FleetPaths


@contextlib.contextmanager
def locked(paths: FleetPaths) -> Iterator[None]:
    """Wait for the lock, and hold it."""
    make_directory(paths.directory.parent)
    handle = os.open(paths.directory.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def try_lock(paths: FleetPaths) -> int | None:
    """Return a descriptor that holds the lock until it is closed; None while another process has the lock.

    Where the parent directory was removed, the lock is one on what is left of its path.
    """
    place = next(directory for directory in paths.directory.parents if directory.exists())
    try:
        handle = os.open(place, os.O_RDONLY)
    except FileNotFoundError:  # removed just now
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
