"""The current condition of a machine beyond its facts, measured by preflight checks and not saved."""

from ipaddress import IPv4Address
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from csdctl.fleet.facts import NumBytes

_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$", max_length=4096)]
_Hostname = Annotated[str, Field(pattern=r"^[\x21-\x7e]+$", max_length=253)]
_Address = Annotated[str, AfterValidator(lambda text: str(IPv4Address(text)))]


@dataclass(frozen=True)
class DirectorySpace:
    """Free space of a directory that ranks write to; None means unknown.

    `refusal` is why a test file could not be written there; '' on success.
    """

    path: _Line
    free_bytes: NumBytes | None = None
    free_inodes: NumBytes | None = None
    refusal: Annotated[str, Field(max_length=500)] = ""


@dataclass(frozen=True)
class Condition:
    """The hostname, addresses and writable directories of a machine."""

    name: str
    hostname: _Hostname | None = None
    addresses: Annotated[tuple[_Address, ...], Field(max_length=1000)] | None = None
    """The IPv4 addresses of all interfaces."""
    home: DirectorySpace | None = None
    temporary: DirectorySpace | None = None
    """TMPDIR, the directory for temporary files of MPI and Python."""
    open_files: NumBytes | None = None
    """Maximum number of open files of a process; None if unknown or unlimited."""
    missing_modules: Annotated[tuple[_Line, ...], Field(max_length=10_000)] | None = None
    """Of those that a job's own code imports; None if unknown, or none was looked for."""
