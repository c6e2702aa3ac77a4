"""What a machine is like right now, beyond its facts: what a preflight measures and nobody keeps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DirectorySpace:
    """A directory that ranks write into. None: it could not be told.

    `refusal` is why a trial file could not be written there; '' when it could.
    """

    path: str
    free_bytes: int | None = None
    free_inodes: int | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Condition:
    """The machine's name for itself, its addresses, and where it can write."""

    name: str
    hostname: str | None = None
    addresses: tuple[str, ...] | None = None
    """The IPv4 addresses of all interfaces."""
    home: DirectorySpace | None = None
    temporary: DirectorySpace | None = None
    """TMPDIR, where MPI and Python put their temporary files."""
    open_files: int | None = None
    """How many files a process may open at most; None also when there is no limit."""
