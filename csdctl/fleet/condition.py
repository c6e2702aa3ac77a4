"""The current condition of a machine beyond its facts, measured by preflight checks and not saved."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DirectorySpace:
    """Free space of a directory that ranks write to; None means unknown.

    `refusal` is why a test file could not be written there; '' on success.
    """

    path: str
    free_bytes: int | None = None
    free_inodes: int | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Condition:
    """The hostname, addresses and writable directories of a machine."""

    name: str
    hostname: str | None = None
    addresses: tuple[str, ...] | None = None
    """The IPv4 addresses of all interfaces."""
    home: DirectorySpace | None = None
    temporary: DirectorySpace | None = None
    """TMPDIR, the directory for temporary files of MPI and Python."""
    open_files: int | None = None
    """Maximum number of open files of a process; None if unknown or unlimited."""
