"""What a failed system call on a file means, and what to do about it. The errors of damaged archives."""

import contextlib
import errno
import os
import struct
import zipfile
import zlib
from pathlib import Path

from csdctl.worker.protocol.limits import explain_error

_LZMA = getattr(zipfile, "lzma", None)
"""None in a Python without LZMA, which cannot read such archives either."""
DAMAGED_ARCHIVE: tuple[type[Exception], ...] = (
    *(OSError, ValueError, LookupError, EOFError, RuntimeError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *([_LZMA.LZMAError] if _LZMA else []),
)
"""The errors of zipfile and gzip for an archive that is damaged, encrypted, or compressed in another way."""
WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of a write alone."""
IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTEMPTY)
PERMANENT = dict.fromkeys((errno.EACCES, errno.EPERM), "fix the permissions") | dict.fromkeys(
    IN_THE_WAY, "move away what is in its place"
)
"""What to do about errors that do not pass, by number."""
REMEDIES = PERMANENT | {
    errno.ENOSPC: "free space on {disk}",
    errno.EDQUOT: "free space on {disk}, or ask for a larger quota",
    errno.EROFS: "mount {disk} read-write: `dmesg` shows why it is not",
    errno.EIO: "check the disk at {disk}: `dmesg`",
}
"""What to do, by error number. `disk` is where the disk is mounted."""


def find_mount(path: str) -> str:
    """Return where the file system of a path is mounted, '/' where that is unknown."""
    with contextlib.suppress(OSError):  # such as a working directory that is gone
        names = (line.split(b" ")[1] for line in Path("/proc/self/mounts").read_bytes().splitlines())
        points = (os.fsdecode(name.decode("unicode_escape").encode("latin-1")) for name in names)
        return max(filter(Path(os.path.realpath(path)).is_relative_to, points), key=len, default="/")
    return "/"


def describe_os_error(error: OSError, path: str | Path = "") -> tuple[str, str]:
    """Return the problem, and what to do, '' if that is unknown. `path`: of an error that names no file."""
    code, name = error.errno or 0, error.filename2 or error.filename or path  # the second of a rename
    path = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    disk = find_mount(path) if name else "the disk of .csdctl or of the output"
    verb, failed = ("write", "a write") if code in WRITING else ("access", "a system call")
    cause = (error.strerror or str(error) or type(error).__name__).lower() + explain_error(str(error))
    problem = f"cannot {verb} {path}: {cause}" if name else f"{failed} failed: {cause}"
    return problem, REMEDIES.get(code, "").format(disk=disk)
